"""Conversations of real people's words at real people's pace, through a gateway; every arrival stamped at the client.

    Script    what a user says next, and how long they think before it: from the chats of `../shared/data/chitchat`
    Seen      one turn: sent, its tokens as they came, what the gateway said of its prompt

Times are `time.time()`: the rows of compactions are stamped by another process of this machine.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import orjson

from bench.load import Client

FILE = Path("chitchat") / "chitchat_1000.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Seen:
    """`arrivals`: of each piece of the answer, usually a token; of an empty one, its end. `cause`: why the prompt did
    not go on from the path."""

    sent_at: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    cause: str
    foreground: bool  # a compaction was made before it, while it waited

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent_at

    @property
    def gaps(self) -> Iterator[tuple[float, float]]:
        """(from, to) of each pair of pieces."""
        return pairwise(self.arrivals)


@dataclass(frozen=True, slots=True)
class Chat:
    """One of the file: what its user said, and seconds from an answer to what they said then."""

    said: tuple[str, ...]
    thought_s: tuple[float, ...]


def chats(data: Path) -> list[Chat]:
    with gzip.open(data / FILE, "rt") as lines:
        return [_chat(json.loads(line)["messages"]) for line in lines]


def _chat(messages: list[dict[str, Any]]) -> Chat:
    said = tuple(message["content"] for message in messages if message["role"] == "user")
    turns = [(a, b) for a, b in pairwise(messages) if (a["role"], b["role"]) == ("assistant", "user")]
    return Chat(said, tuple(_at(b["ts"]) - _at(a["ts"]) for a, b in turns))


def _at(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


@dataclass(slots=True)
class Script:
    """Chat after chat in an order drawn by `random`; each message several of a user's own, of `tokens` at least."""

    chats: list[Chat]
    random: Random
    count: Callable[[str], int]
    tokens: int
    think_scale: float
    think_s: tuple[float, float]  # the least and the most, after scaling
    said: Iterator[str] = field(init=False)
    thought: Iterator[float] = field(init=False)

    def __post_init__(self) -> None:
        self.said, self.thought = self._saying(), self._thinking()

    def _saying(self) -> Iterator[str]:
        while True:
            yield from self.random.choice(self.chats).said

    def _thinking(self) -> Iterator[float]:
        while True:
            yield from self.random.choice(self.chats).thought_s

    def next_message(self) -> str:
        text = next(self.said)
        while self.count(text) < self.tokens:
            text = f"{text} {next(self.said)}"
        return text

    def next_think_s(self) -> float:
        least, most = self.think_s
        return min(max(next(self.thought) * self.think_scale, least), most)


def exported(id: str, model: str, policy: dict[str, Any], script: Script, turns: int) -> bytes:
    """A conversation of `turns` turns as the import route takes it; the answers are a user's words, too."""
    head = {"object": "session", "format": 1, "id": id, "model": model, "system": "You are a friend.", "policy": policy}
    lines: list[dict[str, Any]] = [{**head, "head_turn_id": f"t{turns - 1}"}]
    for number in range(turns):
        items = [
            {"type": "message", "role": role, "content": script.next_message() if role == "user" else answer}
            for role, answer in (("user", ""), ("assistant", next(script.said)))
        ]
        turn = {"object": "turn", "id": f"t{number}", "parent_id": f"t{number - 1}" if number else None}
        lines.append({**turn, "seq": number + 1, "status": "completed", "input": items[:1], "output": items[1:]})
    return b"\n".join(map(orjson.dumps, lines))


async def ask(client: Client, http: aiohttp.ClientSession, session: str, text: str) -> Seen:
    """One streamed turn. Raises RuntimeError where it is refused or does not complete."""
    body = orjson.dumps({"input": text, "stream": True, "temperature": 0})
    headers = {"Content-Type": "application/json"}
    arrivals: list[float] = []
    turn: dict[str, Any] = {}
    rest, sent_at = b"", time.time()
    async with http.post(f"{client.url}/v1/sessions/{session}/turns", data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"a turn was answered {response.status}: {(await response.read())[:900]!r}")
        async for piece in response.content.iter_any():
            now = time.time()
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                told = _data(event)
                if told.get("delta"):
                    arrivals.append(now)
                turn = told.get("turn", turn)
    if turn.get("status") != "completed":
        raise RuntimeError(f"a turn did not complete: {turn}")
    usage, report = turn["usage"], turn["metadata"].get("prefix_report") or {}
    return Seen(
        sent_at,
        tuple(arrivals) or (time.time(),),
        usage["prompt_tokens"],
        usage["cached_tokens"] or 0,
        report.get("cause") or "",
        "compaction" in turn["metadata"],
    )


def _data(event: bytes) -> dict[str, Any]:
    for line in event.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            found: dict[str, Any] = orjson.loads(line[6:])
            return found
    return {}
