"""Limits of two gateways that count in one place: exact together, kept over a hand-over, back after a disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.echo import EchoEngine
from gateway.store.limit_records import Holder, Limits
from gateway.store.usage_records import Amount, UsageQuery, amount_of
from tests.faults.test_handover import TEXT, moved, slow
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def two(folder: Path, engine: EchoEngine, **limits: int) -> AsyncIterator[tuple[Live, Live]]:
    given: dict[str, Any] = {"grace_s": 0.05, "handover_s": 5, "limits_storage": "database"}
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(live_gateway(folder, {"echo": engine}, gateway_name=name, **given))
            for name in ("first", "second")
        ]
        await a.app.state.gateway.store.set_limits(Holder("default"), Limits(**limits))
        for one in (a, b):
            await one.app.state.gateway.room.gate.refresh()
        yield a, b


@asynccontextmanager
async def watched(engine: EchoEngine) -> AsyncIterator[list[int]]:
    """How many requests the engine works on, looked at all the while."""
    seen = [0]

    async def watch() -> None:
        while True:
            seen.append((await engine.load()).running)
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()


async def passes(live: Live, session: str) -> None:
    """A turn is let through, as soon as what was held has come back."""
    for _ in range(300):
        answer = await live.turn(session, "hi", max_output_tokens=4)
        if answer.status_code == 200:
            return
        assert answer.json()["error"]["details"]["name"] == "concurrent_turns", answer.text
        await asyncio.sleep(0.05)
    raise AssertionError("the slot did not come back within 15 s")


async def test_turns_at_once_over_two_gateways(tmp_path: Path) -> None:
    engine = EchoEngine(tokens_per_s=200)
    async with two(tmp_path, engine, concurrent_turns=3) as gateways:
        sessions = [await gateways[0].session() for _ in range(24)]
        async with watched(engine) as seen:
            asked = (gateways[n % 2].turn(session, TEXT, max_output_tokens=40) for n, session in enumerate(sessions))
            answers = await asyncio.gather(*asked)
        passed = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.json()["error"]["details"]["name"] for answer in refused} == {"concurrent_turns"}
        assert max(seen) == 3
        assert len(passed) >= 3
        stored = [len(await gateways[0].turns(session)) for session in sessions]
        assert sum(stored) == len(passed)  # nothing of a refused one is kept


async def test_a_turn_that_another_gateway_goes_on_with_keeps_its_slot_and_is_booked_once(tmp_path: Path) -> None:
    engine = slow()
    async with two(tmp_path, engine, concurrent_turns=1, tokens_per_minute=100_000) as (a, b), watched(engine) as seen:
        session, other = await a.session(user_ref="ann"), await a.session()
        turning = asyncio.create_task(moved(a, b, session, 6))
        for _ in range(1000):
            if max(seen):
                break
            await asyncio.sleep(0.005)
        await passes(b, other)  # refused at the second gateway while the turn runs, there or here
        events = await turning
        assert max(seen) == 1
        assert events[-1]["turn"]["status"] == "completed"
        assert events[-1]["turn"]["metadata"]["handed_over"]
        store = b.app.state.gateway.store
        (turn,) = await store.list_turns("default", session)
        page = await store.usage(UsageQuery("default", 0, 100_000, ("key", "user"), where={"session": session}))
        assert [line.group for line in page.lines] == [("local", "ann")]
        assert page.lines[0].total("turn") == amount_of(turn.usage) != Amount()


async def test_a_slot_comes_back_when_the_client_leaves(tmp_path: Path) -> None:
    async with two(tmp_path, EchoEngine(tokens_per_s=30), concurrent_turns=1) as (a, b):
        session, other = await a.session(), await a.session()
        body = {"input": TEXT * 10, "max_output_tokens": 500, "stream": True, "on_disconnect": "cancel"}
        async with a.client.stream("POST", f"/v1/sessions/{session}/turns", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            assert (await b.turn(other, "hi")).status_code == 429
        await passes(b, other)
