"""A replica that is not up yet joins when it is, whatever came in between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engines.contract import Engine, EngineUnreachable
from engines.echo import EchoEngine
from gateway.fleet import roster
from gateway.fleet.member import Member
from tests.gateway.live import live_gateway

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, slots=True)
class Late(Member):
    """Answers after it failed with each of `before`."""

    before: list[Exception] = field(default_factory=list)

    async def connected(self) -> Engine:
        if self.before:
            raise self.before.pop(0)
        return EchoEngine(name=self.name)


async def test_nothing_that_connecting_meets_keeps_a_replica_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "CONNECT_AGAIN_S", 0.0)
    async with live_gateway(tmp_path) as live:
        gateway = live.app.state.gateway
        member = Late("late", "http://late", before=[EngineUnreachable("not yet"), KeyError("a mistake of ours")])
        async with asyncio.timeout(5):
            await gateway.roster._begin(member)
        assert gateway.fleet.get("late") is not None
        assert "late" not in gateway.roster.trouble
