"""Two stores on one database: exactly one wins a session, and what it holds nobody else can finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.store.compaction_records import CompactionOver, CompactionRecord, CompactionRunning, ViewMoved
from gateway.store.erasure_records import Place
from gateway.store.records import Begun, Busy, HeadMoved, Known, LeaseLost, NewSession
from gateway.store.sessions import Store, open_store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, begin, committing, compact, compaction, finish, session, talk

pytestmark = pytest.mark.anyio


@pytest.fixture
async def other(url: str, clock: Clock) -> AsyncIterator[Store]:
    async with open_store(url, clock=clock, synchronous="NORMAL") as opened:
        yield opened


async def test_one_wins_each_round(store: Store, other: Store) -> None:
    await store.create_session(session())
    head = None
    for number in range(30):
        outcomes = await asyncio.gather(
            store.begin_turn(begin(f"a{number}", head, owner="a/1")),
            other.begin_turn(begin(f"b{number}", head, owner="b/1")),
        )
        (won,) = [outcome for outcome in outcomes if isinstance(outcome, Begun)]
        (lost,) = [outcome for outcome in outcomes if not isinstance(outcome, Begun)]
        assert isinstance(lost, Busy)
        assert won.seq == won.fence == number + 1
        assert won.parent_id == head
        winner = store if outcomes[0] is won else other
        await winner.finish_turn(finish(won.turn_id, won.fence))
        head = won.turn_id
    path = await other.path(TENANT, SESSION, str(head))
    assert [record.turn.seq for record in path] == list(range(1, 31))


async def test_a_session_made_by_both_at_once_is_made_once(store: Store, other: Store) -> None:
    for number in range(10):
        new = NewSession(id=f"new{number}", tenant_id=TENANT, model="small")
        outcomes = await asyncio.gather(
            *(
                one.begin_turn(begin(f"{name}{number}", session_id=new.id, owner=f"{name}/1", create=new))
                for one, name in ((store, "a"), (other, "b"))
            )
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Begun", "Busy"]


async def test_one_key_sent_to_both_runs_once(store: Store, other: Store) -> None:
    for number in range(10):
        new = NewSession(id=f"new{number}", tenant_id=TENANT, model="small")
        keyed = {"session_id": new.id, "create": new, "idempotency_key": "k", "request_hash": b"h"}
        outcomes = await asyncio.gather(
            store.begin_turn(begin(f"a{number}", owner="a/1", **keyed)),
            other.begin_turn(begin(f"b{number}", owner="b/1", **keyed)),
        )
        (known,) = [outcome for outcome in outcomes if isinstance(outcome, Known)]
        (won,) = [outcome for outcome in outcomes if isinstance(outcome, Begun)]
        assert known.turn.turn.id == won.turn_id


async def test_a_holder_that_slept_beyond_its_lease_is_refused(store: Store, other: Store, clock: Clock) -> None:
    first = await store.begin_turn(begin("a", owner="a/1", create=session()))
    assert isinstance(first, Begun)
    clock.now += 5
    second = await other.begin_turn(begin("b", owner="b/1"))
    assert isinstance(second, Begun)
    with pytest.raises(LeaseLost):
        await store.finish_turn(finish("a", first.fence))
    assert await store.renew_leases("a/1", [(TENANT, SESSION, first.fence)]) == [(TENANT, SESSION, first.fence)]
    await other.finish_turn(finish("b", second.fence))
    assert await store.begin_turn(begin("c", None)) == HeadMoved("b")


async def test_many_sessions_from_both_sides(store: Store, other: Store) -> None:
    """Locks are taken in one order, so batches of two gateways over the same sessions do not block each other."""
    names = [f"s{number}" for number in range(20)]
    for name in names:
        await store.create_session(session(name))

    async def talk(one: Store, owner: str, name: str) -> int:
        done = 0
        for number in range(5):
            turn_id = f"{name}-{owner}-{number}"
            while not isinstance(outcome := await attempt(one, owner, name, turn_id), Begun):
                assert isinstance(outcome, (Busy, HeadMoved))
                await asyncio.sleep(0.002)
            await one.finish_turn(finish(turn_id, outcome.fence, session_id=name))
            done += 1
        return done

    async def attempt(one: Store, owner: str, name: str, turn_id: str) -> object:
        record = await one.get_session(TENANT, name)
        assert record is not None
        return await one.begin_turn(begin(turn_id, record.head_turn_id, session_id=name, owner=f"{owner}/1"))

    await asyncio.gather(
        *(talk(store, "a", name) for name in names), *(talk(other, "b", name) for name in reversed(names))
    )
    for name in names:
        record = await store.get_session(TENANT, name)
        assert record is not None
        path = await store.path(TENANT, name, str(record.head_turn_id))
        assert [turn.turn.seq for turn in path] == list(range(1, 11))


async def test_a_cancel_asked_at_one_gateway_reaches_the_other(store: Store, other: Store) -> None:
    await store.begin_turn(begin("a", owner="a/1", create=session()))
    assert await other.request_cancel(TENANT, SESSION, "a")
    assert [turn.turn_id for turn in await store.cancelled_turns("a/1")] == ["a"]


# ---- compactions


async def test_both_compact_a_session_and_one_runs(store: Store, other: Store) -> None:
    await talk(store, "t1")
    for number in range(10):
        outcomes = await asyncio.gather(
            store.begin_compaction(compaction(f"a{number}", "t1", number, owner="a/1")),
            other.begin_compaction(compaction(f"b{number}", "t1", number, owner="b/1")),
            return_exceptions=True,
        )
        (won,) = [outcome for outcome in outcomes if isinstance(outcome, CompactionRecord)]
        (lost,) = [outcome for outcome in outcomes if isinstance(outcome, CompactionRunning)]
        assert lost.id == won.id
        assert won.number == number + 1
        await store.commit_compaction(TENANT, SESSION, won.id, **committing("t1", number))


async def test_two_commits_on_one_view_and_one_counts(store: Store, other: Store, clock: Clock) -> None:
    """One comes late, past its deadline, when the other gateway begins its own on the same view."""
    await talk(store, "t1")

    async def take_over(id: str, expected: int) -> int:
        await other.begin_compaction(compaction(id, "t1", expected, owner="b/1"))
        return await other.commit_compaction(TENANT, SESSION, id, **committing("t1", expected))

    for expected in range(10):
        await store.begin_compaction(compaction(f"a{expected}", "t1", expected, owner="a/1", deadline_s=1.0))
        clock.now += 1
        outcomes = await asyncio.gather(
            store.commit_compaction(TENANT, SESSION, f"a{expected}", **committing("t1", expected)),
            take_over(f"b{expected}", expected),
            return_exceptions=True,
        )
        (lost,) = [outcome for outcome in outcomes if not isinstance(outcome, int)]
        assert isinstance(lost, (ViewMoved, CompactionOver)), lost
        assert expected + 1 in outcomes
        assert (await store.view_of(TENANT, SESSION, "t1")).view_version == expected + 1
    statuses = [row.status for row in await store.list_compactions(TENANT, SESSION, limit=100)]
    assert statuses.count("committed") == 10
    assert "running" not in statuses


async def test_turns_from_one_side_while_the_other_compacts_and_pins(store: Store, other: Store) -> None:
    """No turn waits for a compaction, is lost to it or aborts it, and every change of the view is counted."""
    await talk(store, "t0")
    rounds, retried = 20, 0

    async def converse() -> None:
        nonlocal retried
        for number in range(1, rounds + 1):
            while isinstance(outcome := await ask(f"t{number}"), HeadMoved):
                retried += 1
            assert isinstance(outcome, Begun), outcome
            await other.finish_turn(finish(f"t{number}", outcome.fence))

    async def ask(turn_id: str) -> object:
        record = await other.get_session(TENANT, SESSION)
        assert record is not None
        built = {"expected_version": record.version, "expected_view": record.view_version}
        return await other.begin_turn(begin(turn_id, record.head_turn_id, owner="b/1", **built))

    async def change() -> None:
        for number in range(rounds):
            record = await store.get_session(TENANT, SESSION)
            assert record is not None
            head = str(record.head_turn_id)
            assert await compact(store, f"c{number}", head, head) == 2 * number + 1
            await store.pin_turn(TENANT, SESSION, "t0", number % 2 == 0)

    await asyncio.gather(converse(), change())
    record = await store.get_session(TENANT, SESSION)
    assert record is not None
    assert (record.head_turn_id, record.view_version) == (f"t{rounds}", 2 * rounds)
    assert retried <= 2 * rounds
    path = await store.path(TENANT, SESSION, f"t{rounds}")
    assert [turn.turn.id for turn in path] == [f"t{number}" for number in range(rounds + 1)]


async def test_gateways_that_begin_together_name_the_same_places(store: Store, other: Store) -> None:
    for number in range(20):
        place = Place(f"replica-{number}")
        await asyncio.gather(*(each.add_place(place) for each in (store, other, store, other)))
