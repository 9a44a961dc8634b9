"""A model's tokenizer: text to ids and back, where only the caller decides what is a control token.

    Rendered text   <|im_start|>user\n Hello <|im_end|> you ... <|im_end|>
                    `- control -'      quoted: plain ids     `- control -'

The text is cut at the template's own control tokens; the pieces between are encoded with control tokens switched off.
At load this is compared with encoding whole texts; a tokenizer for which the two differ encodes whole texts only, and
refuses the ones that hold somebody's control-token look-alike. Knows no templates and no messages.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from gateway.errors import BadRequest, TooLarge
from gateway.sessions.bytelevel import FastEncoder, fast_encoder
from gateway.sessions.template import Rendered, token_pattern

PROBES = (
    "Hello, world! It's 2026; don't panic.\n\n  def f(x):\n\treturn x**2  # naïve café\n",
    " leading space, 日本語のテキスト, Привет мир, مرحبا, 👩‍👩‍👧 12345.678e-9   \n \n",
    '{"a": [1, 2, {"b": null}], "c": "d\\"e"}',
    "<", "user\nHi", "\n", "\n\n", " ", "   x", "a" * 300, "ÅÅ", "\u200b\u202e zero",
)  # fmt: skip


LONG_TEXT = 16_384  # characters


class TextTooLong(TooLarge):
    """A text has more bytes than may be tokenized; the numbers are in the message."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"The text has {size} bytes; at most {limit} are tokenized.", details={"bytes": size, "limit": limit}
        )
        self.size = size
        self.limit = limit


class ControlTextRefused(BadRequest):
    """The text holds the name of a control token, and this tokenizer cannot encode it as plain text."""

    code = "control_token_in_text"


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids as u32 little-endian."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Ids from u32 little-endian."""
    ids = array("I")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


class Vocabulary:
    """Encodes and decodes for one tokenizer.json. `template_text`: what the chat template writes literally.

    `controls` maps the name of each control token to its id: every special token of the tokenizer, and each other
    added token that the template writes ("<tool_call>"). Everything else people may type freely.
    """

    def __init__(self, tokenizer_json: str, *, template_text: str = "", special: Iterable[str] = ()) -> None:
        declared = json.loads(tokenizer_json)
        added: list[dict[str, Any]] = declared["added_tokens"]
        named = set(special)
        self.special = frozenset(
            token["content"] for token in added if token["special"] or token["content"] in named
        )  # control tokens that not even an answer's text may hold
        for token in added:
            name = token["content"]
            token["special"] = (
                token["special"] or name in named or (name in template_text and bool(name.strip("▁ \n\t\r")))
            )
        self.controls: dict[str, int] = {token["content"]: token["id"] for token in added if token["special"]}
        self._names = {id: name for name, id in self.controls.items()}
        self._pattern = _control_pattern([token for token in added if token["special"]])
        self._other_added = token_pattern(token["content"] for token in added if not token["special"])
        marked = json.dumps(declared, ensure_ascii=False)
        self._tokenizer = Tokenizer.from_str(marked)
        self._tokenizer.encode_special_tokens = True  # control tokens off: `encode_text` never yields one
        self.num_tokens = self._tokenizer.get_vocab_size()
        self._inner = _without_prefix_space(declared)
        self._whole: Tokenizer | None = None
        self._fast: FastEncoder | None = None
        self._fast = fast_encoder(declared, self.encode_text, probes=PROBES)
        self.unsafe = frozenset(
            name
            for name, id in self.controls.items()
            if id in self._encode(name, True) or id in self._encode(name, False)
        )
        whole = Tokenizer.from_str(marked)
        if not self._pieces_equal(whole):
            self._whole = whole

    def holds(self, ids: Iterable[int]) -> bool:
        """Whether each of them is the id of a token. (Where a vocabulary has holes, its ids go beyond their number.)"""
        return all(id < self.num_tokens or self._tokenizer.id_to_token(id) is not None for id in ids)

    @property
    def exact(self) -> bool:
        """Whether encoding by pieces equals encoding whole texts."""
        return self._whole is None

    @property
    def fast(self) -> bool:
        """Whether plain text is encoded by tiktoken."""
        return self._fast is not None

    def name_of(self, id: int) -> str | None:
        """Name of a control token; None for any other id."""
        return self._names.get(id)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text of its own. No control token among them, whatever the text says."""
        return self._encode(text, first=True)

    def encode(self, rendered: Rendered, *, first: bool = True) -> list[int]:
        """Ids of a rendering. `first`: it stands at the beginning of the prompt."""
        if self._whole is not None:
            if rendered.quoted or self._spans_seam(rendered):
                raise ControlTextRefused("The text holds the name of a control token of this model.")
            if not first:
                raise ValueError("this tokenizer encodes whole prompts only")
            return _ids(self._whole, rendered.text)
        ids = []
        end = 0
        for start, stop, name in self._controls_in(rendered):
            if start > end:
                ids += self._encode(rendered.text[end:start], first and end == 0)
            ids.append(self.controls[name])
            end = stop
        if end < len(rendered.text):
            ids += self._encode(rendered.text[end:], first and end == 0)
        if rendered.quoted and self.unsafe:
            for start, stop in rendered.quoted:
                if (name := rendered.text[start:stop]) in self.unsafe:
                    raise ControlTextRefused(f"This model's tokenizer cannot encode {name!r} as plain text.")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens readable. An incomplete character reads as U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def plain_text(self, ids: Sequence[int]) -> str:
        """Text of ids as an engine sends it: special tokens left out."""
        return self.decode([i for i in ids if self._names.get(i) not in self.special])

    @property
    def tokenizer(self) -> Tokenizer:
        """For DecodeStream; not to be changed."""
        return self._tokenizer

    def first_control(self, rendered: Rendered) -> tuple[int, int, str] | None:
        """Start, end and name of the first control token that the template wrote."""
        return next(self._controls_in(rendered), None)

    def _controls_in(self, rendered: Rendered) -> Iterator[tuple[int, int, str]]:
        """Start, end (with the white space that the token swallows) and name of the template's control tokens."""
        quoted = dict(rendered.quoted)
        seams = rendered.seams
        position = 0
        while (match := self._pattern.search(rendered.text, position)) is not None:
            kind = match.lastgroup
            start, stop = match.span(kind or 0)
            if quoted.get(start) is not None and quoted[start] >= stop:
                position = quoted[start]
            elif any(start < seam < stop for seam in seams) or any(start < q < stop for q in quoted):
                position = start + 1
            else:
                yield match.start(), match.end(), rendered.text[start:stop]
                position = match.end()

    def _spans_seam(self, rendered: Rendered) -> bool:
        return any(
            match.start() < seam < match.end()
            for match in self._pattern.finditer(rendered.text)
            for seam in rendered.seams
        )

    def _encode(self, text: str, first: bool) -> list[int]:
        fast = self._fast
        if fast is not None and fast.takes(text) and self._other_added.search(text) is None:
            return fast.encode(text)
        tokenizer = self._tokenizer if first or self._inner is None else self._inner
        return _ids(tokenizer, text)

    def _pieces_equal(self, whole: Tokenizer) -> bool:
        """Compare both ways of encoding on texts made of probes with control tokens between them."""
        names = list(self.controls)
        names = names[:24] + names[24 :: max(1, len(names) // 24)]
        joined = "".join(
            probe + name for probe, name in zip(PROBES * (len(names) // len(PROBES) + 1), names, strict=False)
        )
        samples = [joined, *(name + probe for name in names[:8] for probe in PROBES), *PROBES]
        samples += ["".join(names), "".join(f"{name}\n" for name in names), "".join(f" {name} x" for name in names)]
        return all(
            self.encode(Rendered(sample)) == whole.encode(sample, add_special_tokens=False).ids for sample in samples
        )


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A long text goes as a batch of one: `encode` keeps Python's lock for seconds a megabyte, a batch gives it up."""
    if len(text) < LONG_TEXT:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _control_pattern(tokens: list[dict[str, Any]]) -> re.Pattern[str]:
    """Matches what the tokenizer takes for a control token: the longest name, with the white space that it swallows."""
    plain: list[str] = []
    special: list[str] = []
    for token in sorted(tokens, key=lambda token: len(token["content"]), reverse=True):
        name = re.escape(token["content"])
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            word = r"\b" if token["single_word"] else ""
            group = f"(?P<t{len(special)}>{name})"
            left, right = r"\s*" if token["lstrip"] else "", r"\s*" if token["rstrip"] else ""
            special.append(f"{left}{word}{group}{word}{right}")
        else:
            plain.append(name)
    both = ([f"(?P<plain>{'|'.join(plain)})"] if plain else []) + special
    return re.compile("|".join(both) or "(?!)")


def _without_prefix_space(declared: dict[str, Any]) -> Tokenizer | None:
    """For a tokenizer that puts a space before the first word of a text only: its twin for pieces further inside."""
    if (declared.get("pre_tokenizer") or {}).get("prepend_scheme") != "first":
        return None
    tokenizer = Tokenizer.from_str(json.dumps(declared, ensure_ascii=False))
    metaspace = tokenizer.pre_tokenizer
    if not isinstance(metaspace, pre_tokenizers.Metaspace):
        return None
    metaspace.prepend_scheme = "never"
    tokenizer.pre_tokenizer = metaspace
    tokenizer.encode_special_tokens = True
    return tokenizer
