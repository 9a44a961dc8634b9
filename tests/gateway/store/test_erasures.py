"""Erasures in the database: what waits for which place, who does it, and sessions whose time to live is over."""

from __future__ import annotations

import asyncio
import math

import pytest

from gateway.store.erasure_records import ARCHIVED, DATABASE, Forgetting, Place
from gateway.store.records import Begun, HeadMoved, SessionChanges, SessionFilter, SessionRecord, SessionRuns
from gateway.store.sessions import Store, open_store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, begin, finish, session, talk

pytestmark = pytest.mark.anyio
HERE, THERE = Place("a"), Place("memory of gw", "memory", "gw")


async def places(store: Store) -> None:
    for place in (HERE, THERE, Place(DATABASE, "database")):
        await store.add_place(place)


async def all_forget(store: Store) -> list[Forgetting]:
    """Every place does what is due there."""
    claimed = [one for place in sorted(await store.due_places()) for one in await store.claim_forgettings(place, 99, 9)]
    for one in claimed:
        await store.forgotten(one, "answered", {"device": 2})
    return claimed


async def test_without_a_place_that_holds_anything_a_receipt_is_done_at_once(store: Store, clock: Clock) -> None:
    await talk(store, "t1")
    receipt = await store.delete_session(TENANT, SESSION)
    assert receipt is not None
    assert (receipt.status, receipt.completed_at, receipt.places) == ("done", clock.now, {})
    assert await store.get_receipt(TENANT, receipt.id) == receipt


async def test_a_receipt_is_done_with_the_last_place_that_forgot(store: Store, clock: Clock) -> None:
    await places(store)
    await talk(store, "t1")
    deleted = await store.delete_session(TENANT, SESSION)
    assert deleted is not None
    assert deleted.status == "pending"
    (first,) = await store.claim_forgettings("a", 9, 30.0)
    assert await store.claim_forgettings("a", 9, 30.0) == [], "it is another's"
    await store.put_off_forgetting(first, 5.0, "away")
    receipt = await store.get_receipt(TENANT, deleted.id)
    assert receipt is not None
    assert receipt.places["a"] == {"state": "pending", "left": 1, "tries": 1, "error": "away"}
    clock.now += 5
    assert [one.tries for one in await all_forget(store)] == [2, 1, 1]
    receipt = await store.get_receipt(TENANT, deleted.id)
    assert receipt is not None
    assert (receipt.status, receipt.completed_at) == ("done", clock.now)
    assert receipt.places["a"] == {"state": "answered", "sessions": 1, "gone": {"device": 2}}
    await store.forgotten(first, "answered", {"device": 2})  # said twice
    assert await store.get_receipt(TENANT, deleted.id) == receipt


async def test_who_dies_over_a_forgetting_leaves_it_to_the_next(store: Store, clock: Clock) -> None:
    await places(store)
    await talk(store, "t1")
    await store.delete_session(TENANT, SESSION)
    assert await store.claim_forgettings("a", 9, 30.0)
    clock.now += 30
    assert [one.tries for one in await store.claim_forgettings("a", 9, 30.0)] == [2]


async def test_places_that_nobody_has_seen_are_gone_memory_before_replicas(store: Store, clock: Clock) -> None:
    await places(store)
    await talk(store, "t1")
    deleted = await store.delete_session(TENANT, SESSION)
    assert deleted is not None
    clock.now += 100
    await store.see_places([DATABASE], memory_s=60, replicas_s=1000)
    receipt = await store.get_receipt(TENANT, deleted.id)
    assert receipt is not None
    assert {name: told["state"] for name, told in receipt.places.items()} == {
        "a": "pending",
        "memory of gw": "gone",
        DATABASE: "pending",
    }
    clock.now += 901
    await store.see_places([DATABASE], memory_s=60, replicas_s=1000)
    assert await all_forget(store) == [Forgetting(TENANT, deleted.id, SESSION, DATABASE, 1)]
    receipt = await store.get_receipt(TENANT, deleted.id)
    assert receipt is not None
    assert (receipt.status, receipt.places["a"]["state"]) == ("done", "gone")


async def test_an_end_user_s_sessions_go_a_few_at_a_time_under_one_receipt(store: Store) -> None:
    await places(store)
    for number in range(23):
        await store.create_session(session(f"s{number}", user_ref="ann" if number < 21 else "bob"))
    erasure = await store.begin_user_erasure(TENANT, "ann", "digest")
    assert await store.begin_user_erasure(TENANT, "ann", "digest") == erasure
    assert await store.user_of_erasure(TENANT, erasure) == "ann"
    parts = []
    while (gone := await store.erase_of_user(TENANT, erasure)) is not None:
        parts.append(len(gone))
    assert parts == [10, 10, 1]
    receipt = await store.get_receipt(TENANT, erasure)
    assert receipt is not None
    assert (receipt.status, receipt.sessions, receipt.erased["sessions"]) == ("pending", 21, 21)
    assert receipt.places["a"]["left"] == 21
    assert await store.user_of_erasure(TENANT, erasure) is None
    assert len(await all_forget(store)) == 63
    receipt = await store.get_receipt(TENANT, erasure)
    assert receipt is not None
    assert (receipt.status, receipt.places["a"]["sessions"], receipt.places["a"]["gone"]) == (
        "done",
        21,
        {"device": 42},
    )
    assert await store.begin_user_erasure(TENANT, "ann", "digest") != erasure
    assert [each.id for each in (await store.list_sessions(TENANT)).sessions] == ["s22", "s21"]


async def test_a_session_that_was_nobody_s_is_the_end_user_s_who_first_speaks_in_it(store: Store) -> None:
    await talk(store, "t1")
    begun = await store.begin_turn(begin("t2", "t1", user_ref="ann"))
    assert isinstance(begun, Begun)
    await store.finish_turn(finish("t2", begun.fence))
    found = await store.get_session(TENANT, SESSION)
    assert found is not None
    assert found.user_ref == "ann"
    await store.begin_turn(begin("t3", "t2", user_ref="bob"))
    found = await store.get_session(TENANT, SESSION)
    assert found is not None
    assert (found.user_ref, found.version) == ("ann", 1)


async def test_a_turn_that_runs_keeps_a_session_from_the_archive(store: Store, clock: Clock) -> None:
    await places(store)
    await talk(store, "t1")
    await store.begin_turn(begin("t2", "t1"))
    with pytest.raises(SessionRuns):
        await store.archive_session(TENANT, SESSION)
    clock.now += 60
    await store.lapse_leases()
    archived = await store.archive_session(TENANT, SESSION)
    assert archived is not None
    assert archived.archived_at == clock.now
    assert isinstance(await store.begin_turn(begin("t3", "t1", expected_version=1)), HeadMoved)
    assert await all_forget(store) == [Forgetting(TENANT, ARCHIVED, SESSION, "a", 1)]


async def test_sessions_that_nobody_used_for_their_tenant_s_time_are_erased_as_those_whose_time_is_over(
    store: Store, clock: Clock
) -> None:
    await places(store)
    for tenant in (TENANT, "long", "ever"):
        await store.add_tenant(tenant, tenant)
        for name in ("idle", "used", "kept", "own"):
            own = {"expires_at": clock.now + 1e6} if name == "own" else {}
            await store.create_session(session(name, tenant_id=tenant, **own))
        await store.archive_session(tenant, "kept")
    await all_forget(store)
    clock.now += 50
    for tenant in (TENANT, "long", "ever"):
        await store.update_session(tenant, "used", None, SessionChanges({"title": "x"}))
    clock.now += 60

    async def idle() -> set[tuple[str, str | None]]:
        found = await store.erase_idle(100.0, {"long": 150.0, "ever": math.inf}, limit=100)
        assert all(receipt.scope == "expired" for _, receipt in found)
        return {(tenant, receipt.session_id) for tenant, receipt in found}

    assert await idle() == {(TENANT, "idle")}
    assert {one.session_id for one in await all_forget(store)} == {"idle"}
    clock.now += 45
    assert await idle() == {(TENANT, "used"), ("long", "idle")}
    clock.now += 1e5
    assert await idle() == {("long", "used")}
    for tenant, left in ((TENANT, {"kept", "own"}), ("ever", {"idle", "used", "kept", "own"})):
        assert {each.id for each in await listed(store, tenant)} == left


async def listed(store: Store, tenant: str) -> tuple[SessionRecord, ...]:
    return (await store.list_sessions(tenant, filter=SessionFilter(include_archived=True))).sessions


async def test_the_database_s_own_files_are_cleaned_and_a_server_is_not_bid_to_all_the_time(
    store: Store, url: str
) -> None:
    await talk(store, "t1")
    await store.delete_session(TENANT, SESSION)
    assert await store.clean()
    assert await store.clean() is url.startswith("sqlite")


async def test_two_gateways_that_sweep_at_once_erase_each_session_once(url: str, clock: Clock) -> None:
    async with open_store(url, clock=clock) as one, open_store(url, clock=clock) as two:
        for number in range(60):
            await one.create_session(session(f"s{number}", expires_at=clock.now + 1))
        clock.now += 2
        found = await asyncio.gather(*(store.erase_expired() for store in (one, two, one, two)))
        erased = [receipt.session_id for part in found for _, receipt in part]
        left = await one.erase_expired()  # rows that another transaction held were passed over
        erased += [receipt.session_id for _, receipt in left]
        assert sorted(map(str, erased)) == sorted(f"s{number}" for number in range(60))
