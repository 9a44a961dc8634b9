"""Pinned turns leave room for a conversation, in whatever order they are pinned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from tests.gateway.live import Live, live_gateway
from tests.gateway.talks import context, settled, summarising, talk

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    async with live_gateway(tmp_path, {"echo": summarising("no use")}) as running:
        yield running


async def _pinned(live: Live, session: str, turns: Iterable[int | str], *, at_once: bool = False) -> list[int]:
    """The status of each pin."""
    routes = [f"/v1/sessions/{session}/turns/{turn}/pin" for turn in turns]
    if at_once:
        answers = await asyncio.gather(*map(live.client.put, routes))
    else:
        answers = [await live.client.put(route) for route in routes]
    return [answer.status_code for answer in answers]


@pytest.mark.parametrize("at_once", [False, True], ids=["newest first", "at once"])
async def test_pins_take_no_more_than_half_the_window_in_whatever_order_they_come(live: Live, at_once: bool) -> None:
    session = await live.session(policy={"strategy": "off"})
    await talk(live, session, 8)
    assert sorted(await _pinned(live, session, range(8, 0, -1), at_once=at_once)) == [200] * 5 + [409] * 3


async def test_a_pin_counts_a_message_whole_that_was_cut(live: Live) -> None:
    session = await live.session(policy={"max_output_tokens": 64, "keep_last": 1})
    await talk(live, session, 1, size=6000)
    await talk(live, session, 1, first=2, size=2500)
    await settled(live, session)
    assert (await context(live, session))["elisions"]
    assert await _pinned(live, session, [1]) == [409]


async def test_pins_of_a_branch_count_on_it(live: Live) -> None:
    session = await live.session(policy={"strategy": "off"})
    turns = await talk(live, session, 6)
    assert (await live.turn(session, "another way", parent_turn_id=turns[1]["id"])).status_code == 200
    assert await _pinned(live, session, [6, 5, 4, 3, 2, 1]) == [200] * 5 + [409]
    assert await _pinned(live, session, [7]) == [200], "the other branch has room"
