"""tiktoken for a served model: the same ids as its own tokenizer, four to five times faster, or nothing.

A byte-level BPE in tokenizer.json names each byte by a printable character (GPT-2's table). Turned back into bytes, its
vocabulary is what tiktoken takes. Ranks are ids only where merges were numbered in id order, so the result is compared
with the tokenizer itself on a probe set, and dropped where one id differs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tiktoken

SPACE_LIMIT = 50_000  # characters; tiktoken 0.14 panics between 100,000 and 1,000,000
NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
_SPACES = re.compile(r"\s{2,}")
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# The same after every digit has been cut out on its own.
DIGITS_SPLIT = r"""\s+(?=\p{N})|\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_of_character() -> dict[str, int]:
    """GPT-2's table of printable characters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class FastEncoder:
    """Encodes plain text as the served model's tokenizer does. `nfc`: the tokenizer composes characters first.

    `unknown`: characters with a byte that the vocabulary lacks; the tokenizer drops such bytes, tiktoken panics.
    """

    encoding: tiktoken.Encoding
    nfc: bool
    unknown: re.Pattern[str] | None

    def takes(self, text: str) -> bool:
        """Whether tiktoken gets through this text. Its patterns overflow the stack on endless white space."""
        if self.unknown is not None and self.unknown.search(text) is not None:
            return False
        return len(text) <= SPACE_LIMIT or all(
            space.end() - space.start() <= SPACE_LIMIT for space in _SPACES.finditer(text)
        )

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(unicodedata.normalize("NFC", text) if self.nfc else text)


def fast_encoder(
    declared: Mapping[str, Any], encode: Callable[[str], list[int]], *, probes: Sequence[str]
) -> FastEncoder | None:
    """tiktoken for a parsed tokenizer.json, where it equals `encode` on `probes` and on its own vocabulary; else None.

    The vocabulary's words are probed too, run together in an order that makes unusual neighbours.
    """
    encoding = encoding_from_tokenizer_json(declared)
    if encoding is None:
        return None
    missing = {byte for byte in range(256) if byte not in NEVER_IN_UTF8} - {
        token[0] for token in encoding.token_byte_values() if len(token) == 1
    }
    if any(0x80 <= byte < 0xC0 for byte in missing):
        return None
    unknown = re.compile(f"[{''.join(map(_characters_from, sorted(missing)))}]") if missing else None
    fast = FastEncoder(encoding, nfc=declared.get("normalizer") is not None, unknown=unknown)
    words = [text for text in map(_text_of, encoding.token_byte_values()[:: max(1, encoding.n_vocab // 6000)]) if text]
    runs = ("".join(words[start::40]) for start in range(40))
    return fast if all(fast.encode(probe) == encode(probe) for probe in (*probes, *runs)) else None


def encoding_from_tokenizer_json(declared: Mapping[str, Any]) -> tiktoken.Encoding | None:
    """An Encoding without special tokens, built from a parsed tokenizer.json; None where it is no byte-level BPE."""
    model = declared["model"]
    normalizer = declared.get("normalizer")
    pattern = _split_pattern(declared.get("pre_tokenizer") or {})
    plain = not any(
        model.get(name) for name in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")
    )
    if pattern is None or model.get("type") != "BPE" or not plain or normalizer not in (None, {"type": "NFC"}):
        return None
    ranks = _ranks(model)
    if ranks is None:
        return None
    return tiktoken.Encoding("served", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def _split_pattern(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """The one regular expression that cuts text as the pre-tokenizer does; None where none is known."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    *before, level = steps
    match before:
        case []:
            return GPT2_SPLIT if level.get("use_regex", True) else None
        case [{"type": "Digits", "individual_digits": True}] if level.get("use_regex", True):
            return DIGITS_SPLIT
        case [{"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(pattern)}}]:
            return None if level.get("use_regex", True) else pattern
    return None


def _ranks(model: Mapping[str, Any]) -> dict[bytes, int] | None:
    """Token bytes -> id, which tiktoken takes for the rank of the merge that makes the token."""
    vocab: Mapping[str, int] = model["vocab"]
    byte_of = byte_of_character()
    merged = ("".join(merge.split(" ", 1)) if isinstance(merge, str) else "".join(merge) for merge in model["merges"])
    ids = [vocab[text] for text in merged]
    if any(later < earlier for earlier, later in pairwise(ids)):
        return None
    return {bytes(byte_of[char] for char in text): id for text, id in vocab.items() if all(c in byte_of for c in text)}


def _characters_from(byte: int) -> str:
    """The characters whose UTF-8 begins with this byte, as a range of a regular expression's character class."""
    if byte < 0x80:
        return re.escape(chr(byte))
    bits, low = (6, byte & 0x1F) if byte < 0xE0 else (12, byte & 0x0F) if byte < 0xF0 else (18, byte & 0x07)
    shortest = {6: 0x80, 12: 0x800, 18: 0x10000}[bits]
    return f"{chr(max(low << bits, shortest))}-{chr(min((low + 1 << bits) - 1, 0x10FFFF))}"


def _text_of(token: bytes) -> str:
    """The token as text; empty where it is a part of a character."""
    return token.decode("utf-8", errors="ignore")
