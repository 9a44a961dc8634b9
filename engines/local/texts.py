"""The tokenizer's files on the front: ids of text, text of ids, and the files the gateway renders with.

Uses the `tokenizers` library alone (no transformers, no torch). Long texts are tokenized in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from engines.local.refusal import Refusal

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")
INLINE_CHARS = 2_000  # or ids: about a millisecond
BYTES_PER_TOKEN = 8  # a longer text cannot be meant for the window; it costs seconds to find out by tokenizing


class Texts:
    """One model's tokenizer. `window` in tokens bounds what is tokenized at all."""

    def __init__(self, folder: Path, window: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._limit = BYTES_PER_TOKEN * window

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelt in it are special. `special`: add what the model's template of plain
        text adds (a beginning-of-sequence id for some). Raises Refusal for a text far beyond the window.
        """
        if len(text) > self._limit:
            raise Refusal("request_too_large", f"a text of {len(text)} characters: at most {self._limit} are tokenized")
        if len(text) <= INLINE_CHARS:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens spelt out."""
        if len(ids) <= INLINE_CHARS:
            return self._decode(ids)
        return await asyncio.to_thread(self._decode, ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)


def tokenizer_file(folder: Path, name: str) -> bytes | None:
    """One of FILES as it lies there. A template that is only inside tokenizer_config.json is given as a file too."""
    if name not in FILES:
        return None
    if (folder / name).is_file():
        return (folder / name).read_bytes()
    return _template(folder).encode() or None if name == "chat_template.jinja" else None


def fingerprint(folder: Path) -> str:
    """SHA-256 (hex) over tokenizer.json and the chat template: `Capabilities.tokenizer`."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes() + _template(folder).encode()).hexdigest()


def _template(folder: Path) -> str:
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text()
    settings = folder / "tokenizer_config.json"
    declared = json.loads(settings.read_text()).get("chat_template") if settings.is_file() else None
    if isinstance(declared, list):  # the older form: named templates
        named = {entry["name"]: entry["template"] for entry in declared}
        declared = named.get("tool_use", named.get("default"))
    return declared if isinstance(declared, str) else ""
