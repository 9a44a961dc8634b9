"""A model's chat template: messages in, text out, with the text that people wrote kept apart.

A template is a Jinja program that comes with the model. It runs sandboxed, under a time and a size limit. Text that
holds the name of a control token ("<|im_end|>") is marked before rendering with nonces that nobody can guess, and the
marks are cut out again afterwards, so that the template's own control tokens and look-alikes are told apart:

    messages --mark--> Jinja --unmark--> Rendered(text, quoted spans, seams)

Knows no token ids and no files.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import BadRequest

RENDER_LIMIT_S = 1.0  # of one rendering; measured 1 ms per 100 messages
GROWTH_LIMIT = 4  # a rendering may be this many times its input, plus GROWTH_ROOM
GROWTH_ROOM = 256 * 1024  # characters
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

Message = Mapping[str, Any]


class TemplateRefused(BadRequest):
    """The model's template does not take these messages (an unknown role, roles that do not alternate, ...)."""

    code = "messages_not_renderable"


class NotText(BadRequest):
    """A message holds something that token ids cannot carry: an image, a file, audio."""

    code = "unsupported_content"


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template wrote. Offsets count characters of `text`.

    quoted   spans that read like a control token but were written by somebody else than the template
    seams    places where two texts meet that must not grow together into a control token
    """

    text: str
    quoted: tuple[tuple[int, int], ...] = ()
    seams: tuple[int, ...] = ()

    def after(self, offset: int) -> Rendered:
        """The part from `offset` on."""
        return Rendered(
            self.text[offset:],
            tuple((start - offset, end - offset) for start, end in self.quoted if start >= offset),
            tuple(seam - offset for seam in self.seams if seam > offset),
        )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads the class attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as model templates expect of `tojson`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


class ChatTemplate:
    """One compiled template. `special_tokens` are names that it may read, such as `bos_token`.

    `options` names the other variables that it reads: what a request may set ("enable_thinking").
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], clock: Callable[[], datetime]) -> None:
        environment = _environment()
        environment.globals["strftime_now"] = lambda layout: clock().strftime(layout)
        self.source = source
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self.options = _options(tree) - OWN_NAMES - set(environment.globals) - set(special_tokens)
        self.literals = "\0".join(
            [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
            + [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
        )
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any],
        generation: bool,
    ) -> str:
        """Text of the prompt. `generation`: ends where the model's answer begins. Raises TemplateRefused."""
        limit = GROWTH_ROOM + GROWTH_LIMIT * _size((messages, tools))
        deadline = time.monotonic() + RENDER_LIMIT_S
        chunks: list[str] = []
        size = 0
        try:
            for chunk in self._template.generate(
                **{
                    **self._special_tokens,
                    **options,
                    "messages": messages,
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": generation,
                }
            ):
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise TemplateRefused(f"The chat template wrote more than {limit} characters for these messages.")
                if time.monotonic() > deadline:
                    raise TemplateRefused(f"The chat template ran for more than {RENDER_LIMIT_S} s on these messages.")
        except (
            jinja2.TemplateError,
            TypeError,
            KeyError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
        ) as error:
            raise TemplateRefused(f"The model's chat template does not take these messages: {error}") from error
        return "".join(chunks)


def _options(tree: jinja2.nodes.Template) -> frozenset[str]:
    """Names that a template reads and does not itself set, or sets only where they are not defined."""
    stored = {node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "store"}
    tests = [test.node for test in tree.find_all(jinja2.nodes.Test) if test.name == "defined"]
    asked = {node.name for node in tests if isinstance(node, jinja2.nodes.Name)}
    return frozenset(jinja2.meta.find_undeclared_variables(tree) - (stored - asked))


def _size(value: Any) -> int:
    """Characters of all strings within."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _size(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return sum(_size(item) for item in value)
    return 8


class Marker:
    """Marks control-token look-alikes in what people wrote, and takes the marks out of the rendering.

    `all_tokens` are every control token; `hard_tokens` those that even an answer's text cannot contain (a template may
    have to read "</think>" in an old answer, never "<|im_end|>").
    """

    def __init__(self, all_tokens: Iterable[str], hard_tokens: Iterable[str]) -> None:
        tokens = tuple(all_tokens)
        self.all = token_pattern(tokens)
        self._hard = token_pattern(hard_tokens)
        self._heads = {token[:cut] for token in tokens for cut in range(1, len(token))}
        self._tails = {token[cut:] for token in tokens for cut in range(1, len(token))}
        self._firsts = {token[0] for token in tokens}
        self._lasts = {token[-1] for token in tokens}
        self._longest = max(map(len, tokens), default=0)

    def mark(self, value: Any, nonce: Nonce, *, hard_only: bool = False) -> Any:
        """A copy of `value`, every string in it (dict keys too) marked; `value` itself where nothing needs it."""
        if isinstance(value, str):
            return self._mark_text(value, nonce, self._hard if hard_only else self.all)
        if isinstance(value, Mapping):
            return {
                self.mark(key, nonce, hard_only=hard_only): self.mark(item, nonce, hard_only=hard_only)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, nonce, hard_only=hard_only) for item in value]
        return value

    def _mark_text(self, text: str, nonce: Nonce, pattern: re.Pattern[str]) -> str:
        marked = text
        if any(first in text for first in self._firsts):
            marked = pattern.sub(lambda match: nonce.open + match[0] + nonce.close, text)
        # A text that ends in "<|im_" may be joined by the template to one that begins with "end|>".
        body = text[-self._longest - 64 :].rstrip()
        if any(first in body for first in self._firsts) and any(
            body[-cut:] in self._heads for cut in range(1, self._longest)
        ):
            cut = len(marked.rstrip())
            marked = marked[:cut] + nonce.close + marked[cut:]
        body = text[: self._longest + 64].lstrip()
        if any(last in body for last in self._lasts) and any(
            body[:cut] in self._tails for cut in range(1, self._longest)
        ):
            cut = len(marked) - len(marked.lstrip())
            marked = marked[:cut] + nonce.open + marked[cut:]
        return marked

    def unmark(self, text: str, nonce: Nonce) -> Rendered:
        """Cut the marks out again."""
        if nonce.open not in text and nonce.close not in text:
            return Rendered(text)
        pieces: list[str] = []
        quoted: list[tuple[int, int]] = []
        seams: list[int] = []
        size = end = 0
        for match in re.finditer(f"{nonce.open}({self.all.pattern}){nonce.close}|{nonce.open}|{nonce.close}", text):
            pieces.append(text[end : match.start()])
            size += match.start() - end
            if match[1] is not None:
                quoted.append((size, size + len(match[1])))
                pieces.append(match[1])
                size += len(match[1])
            else:
                seams.append(size)
            end = match.end()
        pieces.append(text[end:])
        return Rendered("".join(pieces), tuple(quoted), tuple(seams))


@dataclass(frozen=True, slots=True)
class Nonce:
    """Two marks for one rendering: digits only, which no template trims, escapes or changes the case of."""

    open: str
    close: str

    @classmethod
    def fresh(cls) -> Nonce:
        return cls(open=f"7{secrets.randbits(128):039d}", close=f"8{secrets.randbits(128):039d}")


def token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Any of `tokens`, the longest first; matches nothing where there are none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")
