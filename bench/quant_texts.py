"""Texts that every installation has, cut into windows of token ids: what quantization is measured on."""

from __future__ import annotations

import inspect
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tokenizers import Tokenizer

MODULES = ("argparse", "asyncio", "collections", "csv", "ctypes", "datetime", "decimal", "difflib", "email", "enum")
MODULES += ("fractions", "functools", "heapq", "http.client", "inspect", "json", "logging", "optparse", "pathlib")
MODULES += ("pickle", "random", "re", "shutil", "socket", "statistics", "string", "struct", "subprocess", "tarfile")
SOURCES = ("ast", "configparser", "copy", "dataclasses", "gzip", "locale", "plistlib", "queue", "selectors", "shlex")
MODULES += ("tempfile", "textwrap", "threading", "unittest", "urllib.request", "uuid", "zipfile")


@dataclass(frozen=True, slots=True)
class Window:
    text: str  # which text
    ids: list[int]


def texts() -> dict[str, str]:
    """Python's language reference (`help` topics), docstrings of its library, and source of other parts of it."""
    topics = pydoc_data.topics.topics
    return {
        "reference": "\n\n".join(topics[name] for name in sorted(topics)),
        "docstrings": "\n\n".join(_docstrings()),
        "source": "\n\n".join(inspect.getsource(import_module(name)) for name in SOURCES),
    }


def _docstrings() -> Iterator[str]:
    for name in MODULES:
        module = import_module(name)
        yield inspect.getdoc(module) or ""
        for _, member in sorted(vars(module).items()):
            if (inspect.isclass(member) or inspect.isfunction(member)) and member.__module__ == name:
                text = inspect.getdoc(member) or ""
                if len(text) > 200:
                    yield text


def windows(tokenizer: Path, tokens: int, count: int) -> list[Window]:
    """`count` windows of `tokens` ids, none overlapping, of every text in turn. ValueError where they are too few."""
    encode = Tokenizer.from_file(str(tokenizer)).encode
    named = texts()
    each = -(-count // len(named))
    found: list[tuple[int, Window]] = []
    for name, text in named.items():
        ids = encode(text, add_special_tokens=False).ids
        room = len(ids) // tokens
        if room < each:
            raise ValueError(f"the text {name!r} holds {room} windows of {tokens} tokens, {each} are needed")
        starts = [turn * (room // each) * tokens for turn in range(each)]
        found += [(turn, Window(name, ids[at : at + tokens])) for turn, at in enumerate(starts)]
    return [window for _, window in sorted(found, key=lambda one: one[0])][:count]
