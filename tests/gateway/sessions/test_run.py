"""Who waits for a turn: readers of its events, and those that want its end only."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from gateway.sessions.run import Piece, TurnEnded, TurnRun

pytestmark = pytest.mark.anyio

ENDED = TurnEnded("turn_1", None, None, "completed", "stop", (), {}, {})


def begun(on_disconnect: Literal["cancel", "finish"] = "finish") -> TurnRun:
    return TurnRun("turn_1", tenant_id="t", session_id=None, on_disconnect=on_disconnect)


async def test_who_waits_for_the_end_sleeps_through_the_pieces() -> None:
    run = begun()
    waiting = asyncio.create_task(run.wait_end())
    await asyncio.sleep(0)
    asleep_on = run._end_waiters[0]
    for _ in range(3):
        run.emit(Piece("content", "a"))
        await asyncio.sleep(0)
    assert not asleep_on.done()
    run.emit(ENDED)
    assert await waiting is ENDED


async def test_a_follower_gets_every_event_once_however_they_come() -> None:
    run = begun()

    async def follow() -> list[int]:
        return [seq async for seq, _ in run.follow()]

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    run.emit(Piece("content", "a"))
    run.emit(Piece("content", "b"))
    await asyncio.sleep(0)
    run.emit(ENDED)
    assert await following == [1, 2, 3]


async def test_the_last_reader_that_leaves_before_the_end_cancels_the_turn() -> None:
    run = begun("cancel")
    with run.reading():
        with run.reading():
            pass
        assert run.cancel_reason is None
    assert run.cancel_reason == "client_disconnected"
