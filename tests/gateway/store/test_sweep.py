"""Sweeps wait for nobody: what another transaction holds is passed over, and done by the next one."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from sqlalchemy import text

from gateway.store import sweep
from gateway.store.database import normalise, postgres_engine
from gateway.store.records import BeginTurn, Begun, Busy, NewSession
from gateway.store.sessions import Store, open_store
from tests.gateway.store.conftest import EMPTY, Clock, say
from tests.gateway.store.values import TENANT, begin, compaction, finish, session, talk

pytestmark = pytest.mark.anyio

T = TypeVar("T")


async def three_of_each(store: Store, clock: Clock) -> None:
    """Sessions a, b and c whose leases ran out, d, e and f whose time is over; of x, y and z old events, old keys, and
    compactions past their deadline."""
    for name in "abc":
        await store.begin_turn(begin(f"t{name}", session_id=name, create=session(name)))
    for name in "xyz":
        keyed = begin(f"t{name}", session_id=name, create=session(name), idempotency_key="k", request_hash=b"h")
        begun = await store.begin_turn(keyed)
        assert isinstance(begun, Begun)
        await store.append_events(TENANT, name, f"t{name}", 1, [b"{}", b"{}"])
        await store.finish_turn(finish(f"t{name}", begun.fence, session_id=name))
        await store.begin_compaction(compaction(f"c{name}", f"t{name}", 0, session_id=name, deadline_s=5.0))
    for name in "def":
        await store.create_session(session(name, expires_at=clock.now + 1))
    clock.now += 10


async def swept(store: Store, clock: Clock) -> dict[str, object]:
    lapsed = await store.lapse_leases()
    erased = await store.erase_expired()
    return {
        "lapsed": sorted(turn.session_id for turn in lapsed),
        "erased": sorted(receipt.session_id for _, receipt in erased),
        "compactions": await store.lapse_compactions(),
        "events": await store.purge_events(clock.now),
        "keys": await store.forget_keys(clock.now),
    }


async def test_a_sweep_does_all_there_is_part_by_part(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "PART", 2)
    monkeypatch.setattr(sweep, "ERASED", 2)
    await three_of_each(store, clock)
    assert await swept(store, clock) == {
        "lapsed": [*"abc"],
        "erased": [*"def"],
        "compactions": 3,
        "events": 6,
        "keys": 3,
    }
    assert await swept(store, clock) == {"lapsed": [], "erased": [], "compactions": 0, "events": 0, "keys": 0}


async def test_a_compaction_is_failed_past_its_deadline_and_not_before(store: Store, clock: Clock) -> None:
    await talk(store, "t1")
    await store.begin_compaction(compaction("c1", "t1", 0, deadline_s=5.0))
    clock.now += 4
    assert await store.lapse_compactions() == 0
    clock.now += 1
    assert await store.lapse_compactions() == 1
    (failed,) = await store.list_compactions(TENANT, "s1")
    assert failed.error is not None
    assert (failed.status, failed.error["code"], failed.completed_at) == ("failed", "interrupted", clock.now)


async def test_a_start_fails_the_compactions_of_the_gateway_s_earlier_lives_alone(store: Store) -> None:
    for owner in ("gw/1", "gw/2", "gw%/1", "gw2/1"):
        name = owner.replace("/", "-")
        await talk(store, f"t{name}", session_id=name)
        await store.begin_compaction(compaction(f"c{name}", f"t{name}", 0, session_id=name, owner=owner))
    await store.void_leases("gw", "2")
    found = [(await store.list_compactions(TENANT, name))[0] for name in ("gw-1", "gw-2", "gw%-1", "gw2-1")]
    assert [each.status for each in found] == ["failed", "running", "running", "running"]


# ---- PostgreSQL: SQLite has one writer at a time, and nothing to pass over


@pytest.fixture
async def impatient(migrated_postgres: str, clock: Clock) -> AsyncIterator[Store]:
    """A store that would give up a lock after a second."""
    await say(migrated_postgres, EMPTY)
    async with open_store(migrated_postgres, clock=clock, busy_timeout_s=1.0) as opened:
        yield opened


@asynccontextmanager
async def held(url: str, *statements: str, limit_s: float = 30.0) -> AsyncIterator[None]:
    """Another transaction that has run these, and does nothing more for as long as the context is open."""
    engine = postgres_engine(normalise(url), busy_timeout_s=limit_s)
    connection = await engine.connect()
    try:
        for statement in statements:
            await connection.execute(text(statement))
        yield
    finally:
        await connection.invalidate()
        await connection.close()
        await engine.dispose()


@pytest.mark.postgres
async def test_a_sweep_passes_over_what_another_holds(migrated_postgres: str, impatient: Store, clock: Clock) -> None:
    await three_of_each(impatient, clock)
    async with held(
        migrated_postgres,
        "SELECT 1 FROM sessions WHERE id IN ('b', 'e') FOR UPDATE",
        "SELECT 1 FROM turns WHERE id = 'ty' FOR UPDATE",
        "SELECT 1 FROM events WHERE turn_id = 'ty' FOR UPDATE",
        "SELECT 1 FROM compactions WHERE id = 'cy' FOR UPDATE",
    ):
        began = time.monotonic()
        assert await swept(impatient, clock) == {
            "lapsed": [*"ac"],
            "erased": [*"df"],
            "compactions": 2,
            "events": 4,
            "keys": 2,
        }
        assert time.monotonic() - began < 1.0, "it waited"
    assert await swept(impatient, clock) == {"lapsed": ["b"], "erased": ["e"], "compactions": 1, "events": 2, "keys": 1}


@pytest.mark.postgres
async def test_a_gateway_that_froze_in_a_transaction_lets_go_before_others_give_up(
    migrated_postgres: str, impatient: Store
) -> None:
    await impatient.create_session(session())
    async with held(migrated_postgres, "SELECT 1 FROM sessions WHERE id = 's1' FOR UPDATE", limit_s=1.0):
        assert isinstance(await impatient.begin_turn(begin("t1")), Begun)


@pytest.mark.postgres
async def test_fifty_sessions_run_their_turns_while_two_gateways_sweep_all_the_time(migrated_postgres: str) -> None:
    """By a real clock, with something to sweep in each round; nobody is told `StoreUnavailable`, no lease is lost."""
    await say(migrated_postgres, EMPTY)
    sessions, rounds, sweeps = 50, 6, 0
    slowest_s = {"sweep": 0.0, "turn": 0.0}
    done = asyncio.Event()

    async def converse(one: Store, owner: str, name: str) -> None:
        for number in range(rounds):
            turn_id = f"{name}-{owner}-{number}"
            while True:
                outcome = await timed("turn", one.begin_turn(asked(turn_id, name, owner)))
                if isinstance(outcome, Begun):
                    break
                assert isinstance(outcome, Busy)
                await asyncio.sleep(0.01)
            await one.append_events(TENANT, name, turn_id, 1, [b"{}"] * 5, fence=outcome.fence)
            await timed("turn", one.finish_turn(finish(turn_id, outcome.fence, session_id=name)))

    def asked(turn_id: str, name: str, owner: str) -> BeginTurn:
        return begin(
            turn_id, session_id=name, owner=owner, parent=None, lease_s=30.0, idempotency_key=turn_id, request_hash=b"h"
        )

    async def timed(what: str, work: Awaitable[T]) -> T:
        began = time.monotonic()
        outcome = await work
        slowest_s[what] = max(slowest_s[what], time.monotonic() - began)
        return outcome

    async def sweep_on(one: Store, owner: str) -> None:
        nonlocal sweeps
        for number in itertools.count():
            if done.is_set():
                return
            dying = f"dying-{owner}-{number}"
            new = NewSession(id=dying, tenant_id=TENANT, model="small", expires_at=time.time() + 0.01)
            await one.begin_turn(begin(dying, session_id=dying, owner=owner, lease_s=0.01, create=new))
            one.touch_key(TENANT, "key")
            for work in (
                one.lapse_leases(),
                one.erase_expired(),
                one.purge_events(time.time()),
                one.forget_keys(time.time()),
                one.flush_keys(),
            ):
                await timed("sweep", work)
            sweeps += 1

    async with open_store(migrated_postgres) as a, open_store(migrated_postgres) as b:
        for number in range(sessions):
            await a.create_session(session(f"s{number}"))
        sweeping = [asyncio.create_task(sweep_on(one, owner)) for one, owner in ((a, "a/1"), (b, "b/1"))]
        names = [f"s{number}" for number in range(sessions)]
        await asyncio.gather(
            *(converse(a, "a/1", name) for name in names), *(converse(b, "b/1", name) for name in reversed(names))
        )
        done.set()
        await asyncio.gather(*sweeping)
        for name in names:
            found = await a.list_turns(TENANT, name, limit=100)
            assert [record.turn.status for record in found] == ["completed"] * 2 * rounds
    assert sweeps >= 5
    assert max(slowest_s.values()) < 5.0, slowest_s
