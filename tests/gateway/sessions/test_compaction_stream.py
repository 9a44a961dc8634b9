"""Compactions as a stream of events: in order, each under a number of its own, to be resumed after any of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.live import Live, events_of, live_gateway
from tests.gateway.talks import compactions, summarising, talk

pytestmark = pytest.mark.anyio
MANUAL = {"mode": "manual", "strategy": "extract"}


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    async with live_gateway(tmp_path, {"echo": summarising("")}, heartbeat_s=0.4) as running:
        yield running


async def followed(live: Live, session: str, many: int, headers: dict[str, str] | None = None, **query: Any) -> Any:
    """The first events."""
    seen: list[dict[str, Any]] = []
    route = f"/v1/sessions/{session}/compactions/stream"
    async with live.client.stream("GET", route, params=query, headers=headers or {}) as response:
        assert response.status_code == 200
        async for event in events_of(response):
            seen.append(event)
            if len(seen) == many:
                return seen
    raise AssertionError(f"the stream ended after {seen}")


def kinds(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(event["sequence_number"], event["type"].rsplit(".", 1)[1]) for event in events]


async def test_compactions_are_followed_as_they_come(live: Live) -> None:
    session = await live.session(policy=MANUAL)
    await talk(live, session, 7)
    following = asyncio.create_task(followed(live, session, 3))
    made = (await live.client.post(f"/v1/sessions/{session}/compact")).json()
    await asyncio.sleep(0.8)
    await live.client.post(f"/v1/sessions/{session}/compactions/{made['id']}/revert")
    events = await asyncio.wait_for(following, 5)
    assert kinds(events) == [(1, "started"), (2, "completed"), (3, "reverted")]
    assert [event["compaction"]["status"] for event in events] == ["running", "committed", "reverted"]
    assert events[0]["compaction"]["report"] == {}
    (row,) = await compactions(live, session)
    assert events[2]["compaction"] == {k: v for k, v in row.items() if k not in ("segments", "elisions")}


async def test_a_stream_is_resumed_after_any_event_and_loses_none(live: Live) -> None:
    session = await live.session(policy=MANUAL)
    await talk(live, session, 7)
    await live.client.post(f"/v1/sessions/{session}/compact")
    await talk(live, session, 3, first=8)
    second = (await live.client.post(f"/v1/sessions/{session}/compact")).json()
    await live.client.post(f"/v1/sessions/{session}/compactions/{second['id']}/revert")
    every = [(1, "started"), (2, "completed"), (4, "started"), (5, "completed"), (6, "reverted")]
    assert kinds(await followed(live, session, 5)) == every
    for at, (number, _) in enumerate(every[:-1], 1):
        rest = every[at:]
        assert kinds(await followed(live, session, len(rest), starting_after=number)) == rest
        assert kinds(await followed(live, session, len(rest), {"last-event-id": str(number)})) == rest
    assert kinds(await followed(live, session, 3, after=1)) == every[2:]
    assert kinds(await followed(live, session, 1, starting_after=6)) == every[-1:], "reverts are told again"


async def test_a_quiet_stream_begins_at_once_and_then_carries_a_comment_each_heartbeat(live: Live) -> None:
    session = await live.session(policy=MANUAL)
    lines: Counter[str] = Counter()

    async def listen() -> None:
        async with live.client.stream("GET", f"/v1/sessions/{session}/compactions/stream") as response:
            async for line in response.aiter_lines():
                lines[line] += 1

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(listen(), 1.5)
    assert set(lines) == {": following", ": keep-alive", ""}
    assert lines[": following"] == 1
    assert 2 <= lines[": keep-alive"] <= 4


async def test_the_stream_ends_with_the_gateway(live: Live) -> None:
    session = await live.session(policy=MANUAL)
    async with live.client.stream("GET", f"/v1/sessions/{session}/compactions/stream") as response:
        live.app.state.stopping = True
        await asyncio.wait_for(response.aread(), 3)
