"""A drain that is interrupted: past its time, taken back, left by its worker; and what moves of a compacted session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from engines.echo import EchoEngine
from tests.contracts.live import LiveServer
from tests.contracts.wire_app import create_app
from tests.gateway.live import Live, live_gateway
from tests.gateway.talks import settled, summarising, talk

pytestmark = pytest.mark.anyio
ROUTE = "/admin/v1/replicas"
LONG = "a message that is longer than a block of the engine, so that there is something to be found again"


class Gate:
    """What an engine does stands still while it is shut."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.stopped = asyncio.Event()  # somebody stood before it

    def shut(self) -> None:
        self._open.clear()
        self.stopped.clear()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, seconds: float) -> None:
        if not self._open.is_set():
            self.stopped.set()
        await self._open.wait()


def engines(gate: Gate, *names: str) -> Mapping[str, EchoEngine]:
    return {name: EchoEngine(name=name, prefill_tokens_per_s=1e9, sleep=gate) for name in names}


async def shown(live: Live, name: str) -> dict[str, Any]:
    answer = await live.client.get(f"{ROUTE}/{name}")
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def until(live: Live, name: str, state: str) -> dict[str, Any]:
    for _ in range(800):
        if (told := await shown(live, name))["state"] == state:
            return told
        await asyncio.sleep(0.025)
    raise AssertionError(told)


async def drain(live: Live, name: str, **order: Any) -> None:
    answer = await live.client.post(f"{ROUTE}/{name}/drain", json=order)
    assert answer.status_code == 202, answer.text


async def homed(live: Live, replica: str, count: int) -> list[str]:
    """Sessions whose first turn ran at this replica, and no others."""
    found: list[str] = []
    while len(found) < count:
        session = await live.session(model="echo")
        turn = (await live.turn(session, f"{LONG}, {len(found)}")).json()
        if turn["placement"]["replica"] == replica:
            found.append(session)
    return found


async def test_past_its_time_a_drain_ends_and_cuts_no_running_turn(tmp_path: Path) -> None:
    gate = Gate()
    async with live_gateway(tmp_path, engines(gate, "a", "b")) as live:
        gate.shut()
        session = await live.session(model="echo")
        turn = asyncio.create_task(live.turn(session, LONG))
        await gate.stopped.wait()
        busy = next(r["name"] for r in (await live.client.get(ROUTE)).json()["data"] if r["in_flight"])
        await drain(live, busy, timeout_s=0.2)
        told = (await until(live, busy, "drained"))["draining"]
        assert (told["timed_out"], told["running"]) == (True, 1)
        gate.open()
        answer = (await turn).json()
        assert (answer["status"], answer["placement"]["replica"]) == ("completed", busy)
        after = (await live.turn(session, "and on")).json()
        assert after["placement"]["replica"] != busy


async def test_a_drain_that_is_taken_back_moves_nothing_more(tmp_path: Path) -> None:
    gate = Gate()
    async with live_gateway(tmp_path, engines(gate, "a", "b")) as live:
        sessions = await homed(live, "a", 6)
        gate.shut()
        await drain(live, "a")
        await gate.stopped.wait()
        assert (await live.client.post(f"{ROUTE}/a/undrain")).json()["state"] == "ready"
        gate.open()
        for _ in range(40):
            if not live.app.state.gateway.fleet.get("b").in_flight:
                break
            await asyncio.sleep(0.025)
        await asyncio.sleep(1.2)  # the worker has asked for its lease again
        where = [(await live.turn(session, "and on")).json()["placement"]["replica"] for session in sessions]
        assert where.count("a") >= 2, "four at most were on their way"
        assert (await shown(live, "a"))["draining"] is None


async def test_another_gateway_goes_on_with_the_drain_of_one_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.sessions.draining.LEASE_S", 1.0)
    monkeypatch.setattr("gateway.sessions.draining.RENEW_S", 0.3)
    gate = Gate()
    replicas = engines(gate, "a", "b", "c")
    database = f"sqlite:///{tmp_path}/shared.db"
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(
            live_gateway(tmp_path, replicas, database_url=database, gateway_name="one", grace_s=0)
        )
        async with live_gateway(tmp_path, replicas, database_url=database, gateway_name="two") as second:
            sessions = await homed(first, "a", 5)
            gate.shut()
            await drain(first, "a")
            await gate.stopped.wait()
            assert (await until(second, "a", "draining"))["state"] == "draining", "it is known there, too"
            await stack.aclose()
            gate.open()
            told = (await until(second, "a", "drained"))["draining"]
            assert told["sessions_left"] == told["running"] == 0
            for session in sessions:
                turn = (await second.turn(session, "and on")).json()
                assert turn["placement"]["replica"] in ("b", "c")
                assert turn["placement"]["reason"] == "pinned"
                assert turn["usage"]["cached_tokens"] >= 64


async def test_of_a_compacted_session_what_is_sent_now_is_computed_at_its_new_home(tmp_path: Path) -> None:
    replicas = {name: summarising("no use", name=name) for name in ("a", "b")}
    async with live_gateway(tmp_path, replicas) as live:
        policy = {"strategy": "extract", "max_output_tokens": 64, "tokens_per_turn": 100}
        session = await live.session(system="Be brief.", policy=policy)
        turns = await talk(live, session, 8)
        (row,) = await settled(live, session)
        home = turns[-1]["placement"]["replica"]
        await drain(live, home)
        told = (await until(live, home, "drained"))["draining"]
        assert told["moved"] == 1
        turn = (await live.turn(session, "and now?")).json()
        assert (turn["placement"]["reason"], turn["prefix_report"]["cause"]) == ("pinned", "compacted")
        assert turn["placement"]["replica"] != home
        assert turn["usage"]["cached_tokens"] >= row["report"]["tokens_after"] - 64


async def test_a_session_pinned_to_a_replica_that_another_gateway_just_added_goes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.roster.LOOK_EVERY_S", 3600.0)  # nobody looks by himself
    database = f"sqlite:///{tmp_path}/shared.db"
    with LiveServer(create_app(EchoEngine())) as first, LiveServer(create_app(EchoEngine())) as added:
        given = {"embed": False, "database_url": database, "upstreams": [{"url": first.url, "name": "a"}]}
        async with (
            live_gateway(tmp_path, gateway_name="one", **given) as one,
            live_gateway(tmp_path, gateway_name="two", **given) as two,
        ):
            answer = await one.client.post(ROUTE, json={"url": added.url, "name": "new"})
            assert answer.status_code == 201
            session = await one.session(model="echo")
            turn = (await one.turn(session, LONG)).json()
            store = one.app.state.gateway.store
            assert await store.rehome("default", session, turn["id"], {"replica": "new", "epoch": "epoch"})
            assert [r["name"] for r in (await two.client.get(ROUTE)).json()["data"]] == ["a"]
            turn = (await two.turn(session, "and on")).json()
            assert (turn["placement"]["replica"], turn["placement"]["reason"]) == ("new", "pinned")


async def test_a_session_idle_for_longer_than_its_pin_lasts_is_placed_anew(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, engines(Gate(), "a", "b"), pin_ttl_s=0.3) as live:
        session = await live.session(model="echo")
        await live.turn(session, LONG)
        assert (await live.turn(session, "at once")).json()["placement"]["reason"] == "pinned"
        await asyncio.sleep(0.4)
        assert (await live.turn(session, "later")).json()["placement"]["reason"] != "pinned"
