"""Replicas in the database: added once, drained by one worker at a time, their sessions found and moved."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.store.records import Begun
from gateway.store.replica_records import NewReplica, NoReplica, ReplicaExists, TooManyReplicas
from gateway.store.replica_store import REPORTS_S
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, begin, finish, session, tokens

pytestmark = pytest.mark.anyio

A = NewReplica("a", "http://a:1", b"sealed", {"max_in_flight": 3})


async def test_a_replica_is_added_once_and_keeps_what_was_said_of_it(store: Store, clock: Clock) -> None:
    added = await store.add_replica(A, limit=2)
    assert (added.source, added.state, added.credential, added.terms) == ("api", "active", b"sealed", A.terms)
    assert await store.add_replica(A, limit=2) == added
    for other in (NewReplica("a", "http://b:1", None, {}), NewReplica("b", "http://a:1", None, {})):
        with pytest.raises(ReplicaExists):
            await store.add_replica(other, limit=2)
    assert await store.list_replicas() == (added,)
    assert await store.remove_replica("a")
    assert not await store.remove_replica("a")
    assert await store.list_replicas() == ()


async def test_no_more_are_added_than_may_be_and_those_of_the_settings_do_not_count(store: Store) -> None:
    await store.set_replica_state("s", "draining", reason="")
    await store.add_replica(A, limit=1)
    assert (await store.add_replica(A, limit=1)).name == "a"  # the same once more is no other
    b = NewReplica("b", "http://b:1", None, {})
    with pytest.raises(TooManyReplicas, match="1 replicas were added at runtime already; at most 1 may be"):
        await store.add_replica(b, limit=1)
    await store.remove_replica("a")
    assert (await store.add_replica(b, limit=1)).name == "b"


async def test_a_replica_of_the_settings_is_drained_and_not_removed(store: Store, clock: Clock) -> None:
    drained = await store.set_replica_state("s", "draining", reason="why", timeout_s=60.0)
    assert (drained.source, drained.url, drained.state, drained.drain_until) == (
        "settings", None, "draining", clock.now + 60,
    )  # fmt: skip
    clock.now += 5
    assert await store.set_replica_state("s", "draining", reason="again", timeout_s=999.0) == drained
    assert not await store.remove_replica("s")
    active = await store.set_replica_state("s", "active", reason="")
    assert (active.state, active.revision) == ("active", drained.revision + 1)


async def test_a_replica_that_was_removed_is_not_drained_into_being(store: Store, clock: Clock) -> None:
    await store.add_replica(A, limit=9)
    await store.remove_replica("a")
    for state in ("draining", "active"):
        with pytest.raises(NoReplica):
            await store.set_replica_state("a", state, reason="", added=True)
    assert await store.list_replicas() == ()


async def test_what_is_left_of_one_that_stood_in_the_settings_is_in_nobodys_way(store: Store, clock: Clock) -> None:
    await store.set_replica_state("a", "drained", reason="")
    added = await store.add_replica(A, limit=9)
    assert (added.source, added.state) == ("api", "active")
    assert await store.list_replicas() == (added,)


async def test_one_worker_at_a_time_drains_until_its_lease_is_over(store: Store, clock: Clock) -> None:
    record = await store.set_replica_state("s", "draining", reason="", timeout_s=60.0)

    async def work(worker: str, revision: int = record.revision, **progress: Any) -> bool:
        return await store.work_on_drain("s", revision, worker, progress, 5.0)

    assert await work("g1", moved=1)
    assert not await work("g2")
    clock.now += 4
    assert await work("g1", moved=2)
    clock.now += 6
    assert await work("g2", moved=3)
    assert not await work("g1")
    assert not await store.end_drain("s", record.revision, "g1", {})
    assert not await work("g2", revision=record.revision + 1)
    assert await store.end_drain("s", record.revision, "g2", {"moved": 4})
    (ended,) = await store.list_replicas()
    assert (ended.state, ended.progress) == ("drained", {"moved": 4})
    assert not await work("g2")
    assert await store.set_replica_state("s", "draining", reason="") == ended, "drained it is already"


async def test_turns_of_all_gateways_that_live_are_counted(store: Store, clock: Clock) -> None:
    await store.set_replica_state("s", "draining", reason="", timeout_s=60.0)
    await store.report_running("s", "g1", 3)
    await store.report_running("s", "g2", 2)
    await store.report_running("s", "g1", 1)
    assert await store.running_at("s") == 3
    clock.now += REPORTS_S + 1
    await store.report_running("s", "g1", 1)
    assert await store.running_at("s") == 1
    await store.set_replica_state("s", "active", reason="")
    assert await store.running_at("s") == 0


async def answered(store: Store, name: str, replica: str, **other: Any) -> None:
    """A session `name` whose one turn, `name` too, ran at `replica`."""
    create = session(name, tenant_id=other.get("tenant_id", TENANT))
    begun = await store.begin_turn(begin(name, session_id=name, create=create, **other))
    assert isinstance(begun, Begun)
    placement = {"replica": replica, "reason": "pinned", "epoch": "e"}
    made = finish(name, begun.fence, session_id=name, placement=placement, tokens=tokens(0, b"1234", b"5678"), **other)
    await store.finish_turn(made)


async def test_sessions_of_a_replica_are_found_across_tenants_and_by_where_they_were_moved(
    store: Store, clock: Clock
) -> None:
    await answered(store, "old", "a")
    clock.now += 100
    for name, replica in (("s1", "a"), ("s2", "b"), ("s3", "a%"), ("s4", "a-2")):
        await answered(store, name, replica)
    clock.now += 1
    await answered(store, "s5", "a", tenant_id="other")
    found = await store.pinned_sessions("a", 50.0)
    assert [(s.tenant_id, s.session_id, s.turn_id, s.turns, s.path_tokens) for s in found] == [
        ("other", "s5", "s5", 1, 2), (TENANT, "s1", "s1", 1, 2),
    ]  # fmt: skip
    assert not await store.rehome("other", "s1", "s1", {"replica": "b"})
    assert await store.rehome(TENANT, "s1", "s1", {"replica": "b", "epoch": "e2"})
    assert [s.session_id for s in await store.pinned_sessions("a", 50.0)] == ["s5"]
    assert {s.session_id for s in await store.pinned_sessions("b", 50.0)} == {"s1", "s2"}
    last = await store.last_turn(TENANT, "s1")
    assert last is not None
    assert last.placement == {
        "replica": "a", "reason": "pinned", "epoch": "e", "home": {"replica": "b", "epoch": "e2"},
    }  # fmt: skip


async def test_a_session_that_went_on_is_not_moved_and_one_that_runs_is_left_alone(store: Store, clock: Clock) -> None:
    await answered(store, SESSION, "a")
    begun = await store.begin_turn(begin("t2", SESSION))
    assert isinstance(begun, Begun)
    assert await store.pinned_sessions("a", 50.0) == ()
    await store.finish_turn(finish("t2", begun.fence, placement={"replica": "b"}))
    assert not await store.rehome(TENANT, SESSION, SESSION, {"replica": "c"})
    assert await store.pinned_sessions("a", 50.0) == ()
