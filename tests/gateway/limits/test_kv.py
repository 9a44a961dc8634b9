"""A limit of KV bytes: what replicas keep beyond it is given up, idle sessions first; nobody is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engines.echo import EchoEngine
from gateway.limits.kv import KvKeeper
from gateway.secrets import load_secret
from gateway.store.limit_records import Holder, Limits
from gateway.tenancy import affinities
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio
LONG = "the keeper writes the hour into the book " * 8
HOLDER = Holder("default")


class Silent(EchoEngine):
    """It does not tell what it keeps; an engine of another kind has no such method."""

    kept = None  # type: ignore[assignment]


def keeper(live: Live, *, idle_s: float) -> KvKeeper:
    gateway = live.app.state.gateway
    return KvKeeper(
        gateway.store,
        gateway.fleet,
        gateway.room.gate,
        clock=time.time,
        name_of=affinities(load_secret(gateway.settings)),
        salt_of=gateway.room.cache_salt,
        idle_s=idle_s,
    )


async def limit(live: Live, most: int) -> None:
    gateway = live.app.state.gateway
    await gateway.store.set_limits(HOLDER, Limits(kv_bytes=most))
    await gateway.room.gate.refresh()


async def test_the_least_recently_used_go_until_it_fits_and_their_next_turn_works(tmp_path: Path) -> None:
    engine = EchoEngine()
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        sessions = [await live.session() for _ in range(5)]
        for session in sessions:
            assert (await live.turn(session, LONG)).status_code == 200
        sizes = [one.bytes for one in await engine.kept()]
        assert len(sizes) == 5
        await limit(live, sum(sizes[3:]))
        assert (await live.turn(sessions[0], "again")).status_code == 200  # now it was used last
        await keeper(live, idle_s=0.0).round()
        kept = await engine.kept()
        assert sum(one.bytes for one in kept) <= sum(sizes[3:])
        assert kept  # no more went than had to
        for session in sessions:
            assert (await live.turn(session, "go on")).status_code == 200


async def test_sessions_in_use_and_those_of_others_stay(tmp_path: Path) -> None:
    engine = EchoEngine()
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        session = await live.session()
        assert (await live.turn(session, LONG)).status_code == 200
        before = await engine.kept()
        await limit(live, 0)
        await keeper(live, idle_s=30.0).round()
        assert await engine.kept() == before
        await live.app.state.gateway.store.set_limits(HOLDER, Limits())
        await live.app.state.gateway.store.set_limits(Holder("other"), Limits(kv_bytes=0))
        await live.app.state.gateway.room.gate.refresh()
        await keeper(live, idle_s=0.0).round()
        assert await engine.kept() == before


async def test_a_replica_that_does_not_tell_is_named_and_left_alone(tmp_path: Path) -> None:
    engine = Silent(name="silent")
    async with live_gateway(tmp_path, {"silent": engine}) as live:
        session = await live.session()
        assert (await live.turn(session, LONG)).status_code == 200
        await limit(live, 0)
        await keeper(live, idle_s=0.0).round()
        assert engine.paths.kept()
        answer = await live.client.get("/admin/v1/limits")
        assert answer.json()["kv_untold"] == ["silent"]
