"""Real chats of a given length from the folder of real data: people's (Chitchat), and a model's (MT-Bench-101)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

SYSTEM = "You are a helpful assistant."
MARKUP = 5  # tokens around a message, roughly

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Chat:
    set: str
    messages: list[Message]


def chats(data: Path, tokenizer: Any, at_least: int) -> Iterator[Chat]:
    """One of each set in turn: people's chats as they were, and dialogues with a model, several joined to one."""
    sets = {"chitchat": chitchat(data), "mtbench101": mtbench101(data)}
    for several in zip(*(long_enough(one, tokenizer, at_least) for one in sets.values()), strict=False):
        for name, messages in zip(sets, several, strict=True):
            yield Chat(name, messages)


def chitchat(data: Path) -> Iterator[Iterator[Message]]:
    with gzip.open(data / "chitchat" / "chitchat_1000.jsonl.gz", "rt") as lines:
        for line in lines:
            yield ({"role": m["role"], "content": m["content"]} for m in json.loads(line)["messages"])


def mtbench101(data: Path) -> Iterator[Iterator[Message]]:
    """One endless chat a look: who asks for the next one goes on in the file."""
    with (data / "mtbench101" / "mtbench101.jsonl").open() as lines:
        dialogues = (json.loads(line)["history"] for line in lines)
        turns = (turn for history in dialogues for turn in history)
        messages = (
            {"role": role, "content": turn[by]}
            for turn in turns
            for role, by in (("user", "user"), ("assistant", "bot"))
        )
        while (first := next(messages, None)) is not None:
            yield chain([first], messages)


def long_enough(several: Iterator[Iterator[Message]], tokenizer: Any, at_least: int) -> Iterator[list[Message]]:
    """Of each chat that has `at_least` tokens the beginning that has them and ends with an answer."""
    for chat in several:
        messages: list[Message] = []
        tokens = 0
        for message in chat:
            messages.append(message)
            tokens += len(tokenizer.encode(message["content"])) + MARKUP
            if tokens >= at_least and message["role"] == "assistant":
                yield messages
                break


def rendered(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    whole = [{"role": "system", "content": SYSTEM}, *messages]
    return list(tokenizer.apply_chat_template(whole, tokenize=True, return_dict=False))
