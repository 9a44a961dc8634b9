"""Conversations of a given size, deterministic, in OpenAI's chat shape. The newest user message is short, so that an
engine that echoes it answers in a few chunks.
"""

from __future__ import annotations

from random import Random
from typing import Any

WORDS = (
    *("lamp", "keeper", "harbour", "tide", "signal", "glass", "oil", "brass", "stair", "window", "storm", "ledger"),
    *("rope", "bell", "shutter", "watch", "fog", "lens", "night", "morning", "engine", "pilot", "channel", "rock"),
    *("buoy", "mast", "anchor", "stone", "ladder", "clock"),
)


def text(random: Random, size: int) -> str:
    """`size` bytes of words."""
    words: list[str] = []
    length = 0
    while length < size:
        words.append(random.choice(WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


def history(seed: str, messages: int, size: int) -> list[dict[str, Any]]:
    """A system message and then user and assistant in turn, the last a user's of 16 bytes; `size` bytes of JSON."""
    random = Random(seed)
    each = (size - 16) // (messages - 1) - 36  # 36: role, content and braces of a message
    roles = ["system", *(("user", "assistant")[n % 2] for n in range(messages - 2))]
    told = [{"role": role, "content": text(random, each)} for role in roles]
    return [*told, {"role": "user", "content": text(random, 16)}]


def next_message(random: Random) -> dict[str, Any]:
    return {"role": "user", "content": text(random, 16)}
