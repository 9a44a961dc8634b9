"""Echo's tokenizer: bytes. Id 0-255 is that byte, 256 `<|endoftext|>`, 257 `<|im_start|>`, 258 `<|im_end|>`.

The same tokenizer as files, for whoever renders with transformers, lies in ECHO_MODEL_DIR. Packed ids are u32
little-endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.contract import Unsupported

ECHO_MODEL_DIR = Path(__file__).parent / "echo_model"
ID_BYTES = 4
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
SPECIALS = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
_NAMES = {token: text for text, token in SPECIALS.items()}
_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in SPECIALS) + ")")


def encode(text: str) -> list[int]:
    """Ids of a text, special tokens parsed."""
    ids: list[int] = []
    for piece in _SPLIT.split(text):
        if piece in SPECIALS:
            ids.append(SPECIALS[piece])
        else:
            ids += piece.encode("utf-8", "replace")
    return ids


def decode(ids: Sequence[int]) -> str:
    """The text of ids, special tokens spelt out, broken characters as U+FFFD."""
    return b"".join(bytes((i,)) if i < 256 else _NAMES.get(i, "").encode() for i in ids).decode("utf-8", "replace")


def pack(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack(ids: bytes | bytearray) -> list[int]:
    return list(struct.unpack(f"<{len(ids) // ID_BYTES}I", ids))


_USER = pack([IM_START, *b"user\n"])


def last_user_text(ids: bytes | bytearray) -> str:
    """The text of the last user message of a packed ChatML prompt; the whole prompt's where it is none."""
    at = ids.rfind(_USER)
    while at >= 0 and at % ID_BYTES:
        at = ids.rfind(_USER, 0, at + len(_USER) - 1)
    if at < 0:
        return decode([token for token in unpack(ids) if token < END_OF_TEXT])
    rest = unpack(ids[at + len(_USER) :])
    return decode(rest[: rest.index(IM_END)] if IM_END in rest else rest)


def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ids of chat_template.jinja with the generation prompt, text of messages never read as special tokens."""
    ids: list[int] = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            if any(part.get("type") != "text" for part in content):
                raise Unsupported("echo reads text only", param="messages")
            content = "".join(part["text"] for part in content)
        ids += [IM_START, *f"{message['role']}\n{content}".encode("utf-8", "replace"), IM_END, *b"\n"]
    return [*ids, IM_START, *b"assistant\n"]
