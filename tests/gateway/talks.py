"""Conversations that pass a small window, and an echo engine that also writes summaries as it is told to."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from compression.summarize import request
from engines.contract import Sampling
from engines.echo import EchoEngine
from tests.gateway.live import Live

WINDOW = 8192  # tokens of the echo model: bytes
ASKED = request((), budget_tokens=1).split()[0]  # the first word of every request for a summary
ANSWER = 120
_PART = re.compile(r"(?:the (\d+) turns|the one turn) from \"My parcel code number (\d+) is")

Summary = Callable[[str], str]


def summarising(summary: Summary | str, *, window: int = WINDOW, **more: Any) -> EchoEngine:
    """Says back what it is told; asked for a summary, what `summary` says (of the request)."""

    def answer(text: str, sampling: Sampling) -> str:
        if text.startswith(ASKED):
            return summary if isinstance(summary, str) else summary(text)
        return text[:ANSWER]

    return EchoEngine(answer=answer, window=window, **more)


def words(number: int, size: int = 660) -> str:
    """A user's message of `size` bytes with a fact in it."""
    said = f"My parcel code number {number} is PC-{number:04d}-X, please keep it in mind for later. "
    filler = "The weather was mild and nothing of note went on while we walked along the old canal again. "
    return (said + filler * (size // len(filler) + 1))[:size]


def noted(asked: str) -> str:
    """A good summary, as a model would write it: the codes of the part of a talk in `words` that is asked for."""
    if part := _PART.search(asked):
        first = int(part[2])
        codes = {number: f"PC-{number:04d}-X" for number in range(first, first + int(part[1] or 1))}
    else:
        codes = {int(number): code for number, code in re.findall(r"code number (\d+) is (PC-\d{4}-X)", asked)}
    told = ", ".join(f"number {number} is {code}" for number, code in codes.items())
    return f"User's parcel codes to keep in mind: {told}. They walked along the old canal in mild weather."


async def talk(live: Live, session_id: str, turns: int, *, first: int = 1, size: int = 660, **more: Any) -> list[Any]:
    answered = []
    for number in range(first, first + turns):
        answer = await live.turn(session_id, words(number, size), **more)
        assert answer.status_code == 200, answer.text
        answered.append(answer.json())
    return answered


async def compactions(live: Live, session_id: str) -> list[dict[str, Any]]:
    """Newest first."""
    answer = await live.client.get(f"/v1/sessions/{session_id}/compactions", params={"limit": 100})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def settled(live: Live, session_id: str) -> list[dict[str, Any]]:
    """The compactions, once none is under way."""
    for _ in range(500):
        running = live.app.state.gateway.room.compactions.is_running("default", session_id)
        rows = await compactions(live, session_id)
        if not running and all(row["status"] != "running" for row in rows):
            return rows
        await asyncio.sleep(0.02)
    raise AssertionError(f"a compaction of {session_id} did not end: {rows}")


async def context(live: Live, session_id: str, draft: str = "") -> dict[str, Any]:
    answer = await live.client.get(f"/v1/sessions/{session_id}/context", params={"draft": draft})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def said(context: dict[str, Any]) -> str:
    return "\n".join(str(message["content"]) for message in context["messages"])
