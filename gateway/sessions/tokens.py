"""The one seam between text and token ids, for one model: render, extend, count, decode.

    ModelTokens.load(folder)   tokenizer.json, tokenizer_config.json, chat template, config.json, generation_config.json
        .render(messages)      ids of a whole prompt
        .extend(messages)      ids that follow a token path, in O(new messages); None where that cannot be exact
        .fingerprint(tools)    names everything that the ids depend on

Immutable after `load` but for bounded caches of what was proven. Blocking: 0.3 ms a message of usual length, so big
texts belong in a thread. Knows no sessions, no store and no HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

from compression.view import Placement
from gateway.errors import BadRequest
from gateway.sessions.counting import OVERHEAD_PER_MESSAGE
from gateway.sessions.extension import Shape, Tail, continuation, proven
from gateway.sessions.messages import PROBE, RoleCheck, Traits, normalise, traits_of
from gateway.sessions.modelfiles import ModelFiles, give_back_memory
from gateway.sessions.placing import chosen_placement
from gateway.sessions.prefix import Cause, PrefixReport, prefix_report, shared_tokens
from gateway.sessions.template import ChatTemplate, Marker, Message, Nonce, Rendered, TemplateRefused
from gateway.sessions.vocabulary import TextTooLong, Vocabulary, pack_ids, unpack_ids

BYTES_PER_TOKEN = 8  # a text with more bytes than 8 for each token of the window cannot fit, and is not tokenized
HISTORY_TEXTS = 16  # a history may be longer than the window before it is compacted
SHAPES_KEPT = 512
SHORT_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
NO_OPTIONS: Mapping[str, Any] = {}

__all__ = ["ModelTokens", "Tail"]


class ModelTokens:
    """Text and ids of one model. Get one by `load`."""

    def __init__(self, files: ModelFiles, *, name: str, clock: Callable[[], datetime]) -> None:
        self.name = name
        self.window = files.window
        self.revision = files.revision
        self.default_options: Mapping[str, Any] = {}
        self.template_sha = hashlib.sha256(files.template.encode()).hexdigest()
        self.max_bytes = BYTES_PER_TOKEN * files.window
        self.response_template = files.response_template
        if files.response_template is not None:
            import_module("transformers.utils.chat_parsing")  # seconds: now, and not in the first answer
        self._clock = clock
        self.template = ChatTemplate(files.template, special_tokens=files.special_tokens, clock=clock)
        self.vocabulary = Vocabulary(
            files.tokenizer_json, template_text=self.template.literals, special=files.special_tokens.values()
        )
        self._marker = Marker(self.vocabulary.controls, self.vocabulary.special)
        self._traits: Traits = traits_of(self.template)
        self.takes_tools = self._traits.tools
        self.placement: Placement = chosen_placement(lambda messages: self._rendered(messages).text)
        self.message_overhead = self._message_overhead()
        self._roles: dict[bool, RoleCheck] = {}
        self._proven: OrderedDict[tuple[str, Shape], Sequence[Mapping[str, Any]] | None] = OrderedDict()
        self._systems: OrderedDict[tuple[str, bytes], int] = OrderedDict()  # tokens of system prompts
        self._bare_fingerprint = ""
        self._bare_fingerprint = self.fingerprint()
        self.end = self._end_of_answer()
        ends = [] if self.end is None else [self.vocabulary.controls[self.end]]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*files.eos_ids, *ends]))

    @classmethod
    def load(cls, folder: Path, *, name: str, clock: Callable[[], datetime] = datetime.now) -> ModelTokens:
        """Read and verify a model's folder. Raises MissingFile. About a second, most of it tokenizer.json.

        `clock` is what a template's `strftime_now` reads.
        """
        tokens = cls(ModelFiles.read(folder), name=name, clock=clock)
        give_back_memory()
        return tokens

    def fingerprint(self, tools: Sequence[Mapping[str, Any]] = (), options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """SHA-256 (hex) of all that ids depend on besides the messages: model files, template, tools, options."""
        if not tools and not options and self._bare_fingerprint:
            return self._bare_fingerprint
        fields = (
            (b"model", self.revision.encode()),
            (b"template", self.template_sha.encode()),
            (b"tools", _canonical(list(tools))),
            (b"options", _canonical(dict(self.default_options) | dict(options))),
        )
        digest = hashlib.sha256()
        for tag, value in fields:
            digest.update(len(tag).to_bytes(4, "little") + tag + len(value).to_bytes(8, "little") + value)
        return digest.hexdigest()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> bytes:
        """Ids (u32 little-endian) of the whole prompt, generation prompt included.

        Raises TemplateRefused, NotText, TextTooLong, ControlTextRefused.
        """
        self._check_options(options)
        self._check_roles(messages, tools, options)
        return pack_ids(self.vocabulary.encode(self._rendered(messages, tools, options)))

    def extend(
        self,
        messages: Sequence[Message],
        *,
        after: Tail,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> bytes | None:
        """Ids (u32 little-endian) that follow the path `after`: its closing, the new messages, generation prompt.

        None where the template does not let this shape be extended exactly. Raises as `render`.
        """
        self._check_options(options)
        shape = Shape.of(after, messages)
        if after.foreign_end or not messages:
            return None
        standing = self._standing(shape, tools, options)
        if standing is None:
            return None
        render = partial(self._rendered, tools=standing, options=options)
        found = continuation(render, self.vocabulary.first_control, self.end, shape, messages, after.calls)
        if found is None:
            return None
        ids = self.vocabulary.encode(found.rendered, first=False)
        return pack_ids(ids[1:] if found.closed else ids)

    def extendable(
        self, shape: Shape, *, tools: Sequence[Mapping[str, Any]] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> bool:
        """Whether a path of this shape is extended exactly; proven by rendering samples, once for each shape."""
        return self._standing(shape, tools, options) is not None

    def _standing(
        self, shape: Shape, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]] | None:
        """The tools to render a stand-in with: one short tool where that proves enough; None: not extendable."""
        if not self.vocabulary.exact:
            return None
        key = (self.fingerprint(tools, options), shape)
        if key in self._proven:
            return self._proven[key]
        standing = self._prove(shape, tools, options)
        self._proven[key] = standing
        if len(self._proven) > SHAPES_KEPT:
            self._proven.popitem(last=False)
        return standing

    def _prove(
        self, shape: Shape, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]] | None:
        frozen = {**options, "strftime_now": self._clock().strftime}  # midnight must not fall between renderings
        render = partial(self._rendered, tools=tools, options=frozen)
        for standing in ([SHORT_TOOL], tools) if tools else (tools,):
            stand_in = partial(self._rendered, tools=standing, options=frozen)
            if proven(render, stand_in, self.vocabulary.first_control, self.end, shape, tools=bool(tools)):
                return standing
        return None

    def tail(
        self,
        output_ids: Sequence[int],
        *,
        path_tokens: int,
        digest: bytes,
        reasoning: bool = False,
        calls: Sequence[Mapping[str, Any]] = (),
    ) -> Tail:
        """The Tail of a path that ends in these generated ids."""
        last = output_ids[-1] if output_ids else None
        closed = self.end is not None and last == self.vocabulary.controls[self.end]
        foreign = not closed and last in self.stop_ids
        return Tail(path_tokens, digest, not closed, reasoning, bool(calls), tuple(calls), foreign)

    def system_tokens(
        self,
        system: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> int:
        """With how many tokens every prompt begins that has this system message (or none) and these tools, up to the
        first message's own text. Measured once for each: two renderings. Raises as `render`."""
        key = hashlib.sha256(_canonical([dict(message) for message in system])).digest()
        named = (self.fingerprint(tools, options), key)
        if named not in self._systems:
            one, other = (
                self.render([*system, {"role": "user", "content": word}], tools=tools, options=options)
                for word in (PROBE, PROBE[::-1])
            )
            self._systems[named] = shared_tokens(one, other)
            if len(self._systems) > SHAPES_KEPT:
                self._systems.popitem(last=False)
        return self._systems[named]

    def count(self, text: str) -> int:
        """Tokens of a text on its own."""
        self._check_size((text,))
        return len(self.vocabulary.encode_text(text))

    def count_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> int:
        """Tokens of the whole prompt, generation prompt included."""
        return len(self.render(messages, tools=tools, options=options)) // 4

    def decode(self, ids: Sequence[int] | bytes) -> str:
        """Text of ids, control tokens readable."""
        return self.vocabulary.decode(unpack_ids(ids) if isinstance(ids, bytes) else ids)

    def prefix_report(
        self, previous: Sequence[int] | bytes, new: bytes, *, hints: Iterable[Cause] = ()
    ) -> PrefixReport:
        """Where `new` leaves `previous`, and why; `hints` are the causes that the caller knows of."""
        before = previous if isinstance(previous, bytes) else pack_ids(previous)
        return prefix_report(before, new, decode=self.decode, hints=hints)

    def prompt_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> str:
        """The rendered prompt as text, for people to read; the ids come from `render`."""
        return self._rendered(messages, tools, options).text

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
        generation: bool = True,
    ) -> Rendered:
        nonce = Nonce.fresh()
        normal = normalise(messages, self._traits)
        self._check_size([text for message in normal for text in _strings(message)])
        marked = [self._marker.mark(message, nonce, hard_only=message.get("role") == "assistant") for message in normal]
        text = self.template.render(
            marked,
            tools=[self._marker.mark(tool, nonce) for tool in tools],
            options=self._marker.mark({**self.default_options, **options}, nonce),
            generation=generation,
        )
        return self._marker.unmark(text, nonce)

    def _check_roles(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> None:
        if tools and not self.takes_tools:
            raise TemplateRefused(f"The chat template of {self.name} takes no tools.", param="tools")
        check = self._roles.get(bool(tools))
        if check is None:
            check = self._roles[bool(tools)] = RoleCheck()
        check.check(messages, lambda skeleton: self._rendered(skeleton, tools, options).text)

    def _message_overhead(self) -> int:
        """Tokens that the template puts around a message, on the average of a question and its answer."""
        asked, answered = {"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}
        try:
            one, two = (len(self.vocabulary.encode(self._rendered(m))) for m in ([asked], [asked, answered, asked]))
        except TemplateRefused:
            return OVERHEAD_PER_MESSAGE
        return max(0, ceil((two - one) / 2) - len(self.vocabulary.encode_text(PROBE)))

    def _end_of_answer(self) -> str | None:
        """Name of the control token that the template puts right after an answer that ends the conversation."""
        word = "5b7e1f0c93"
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]
        try:
            rendered = self._rendered(messages, generation=False)
        except TemplateRefused:
            return None
        if (at := rendered.text.rfind(word)) < 0:
            return None
        first = self.vocabulary.first_control(rendered.after(at + len(word)))
        return first[2] if first is not None else None

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for option in options:
            if option not in self.template.options:
                known = ", ".join(sorted(self.template.options)) or "none"
                message = f"The chat template of {self.name} has no option {option!r}; it has: {known}."
                raise BadRequest(message, param=f"chat_template_kwargs.{option}"[:200])

    def _check_size(self, texts: Sequence[str]) -> None:
        """Each text may have `max_bytes`, all together HISTORY_TEXTS times as many."""
        if 4 * sum(map(len, texts)) <= self.max_bytes:
            return
        sizes = [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        if max(sizes) > self.max_bytes:
            raise TextTooLong(max(sizes), self.max_bytes)
        if sum(sizes) > HISTORY_TEXTS * self.max_bytes:
            raise TextTooLong(sum(sizes), HISTORY_TEXTS * self.max_bytes)


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item)]
    return []


def _canonical(value: Any) -> bytes:
    """JSON with its keys in the order given: a template writes them so."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
