"""A turn's stream, taken up at a gateway where the turn does not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.echo import EchoEngine
from gateway.sessions.events import TERMINAL_TYPES
from gateway.sessions.registry import Registry
from gateway.sessions.resume import resumed
from gateway.store.sessions import Store
from tests.gateway.live import live_gateway

pytestmark = pytest.mark.anyio


class Late:
    """A store whose first `early` readings of a turn's events are as if they had come before the first was stored."""

    def __init__(self, store: Store, early: int) -> None:
        self._store, self._early = store, early

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def read_events(self, *where: Any) -> list[tuple[int, bytes]]:
        found = await self._store.read_events(*where)
        self._early -= 1
        return [] if self._early >= 0 else found


async def test_events_that_are_stored_while_a_round_looks_are_told_in_the_next(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": EchoEngine(tokens_per_s=40)}) as live:
        await live.session(id="s", model="echo")
        await live.turn("s", "as many words as take a second " * 2, stream=True)
        (turn,) = await live.turns("s")
        room = live.app.state.gateway.room
        record = await room.store.get_turn("default", "s", turn["id"])
        elsewhere = Registry(room.store, owner="other", lease_s=30.0, renew_s=10.0)
        told: list[list[tuple[int, str, bytes]]] = []
        assert await room.store.read_events("default", "s", turn["id"], 0)
        for early in (0, 1):
            other = replace(room, store=Late(room.store, early), registry=elsewhere)
            told.append([each async for each in resumed(other, record, 0)])
        assert told[0] == told[1]
        assert [kind in TERMINAL_TYPES for _, kind, _ in told[0]] == [False] * (len(told[0]) - 1) + [True]
