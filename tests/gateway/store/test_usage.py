"""The usage ledger: what is booked, once, under which names, and what of it outlives an erasure."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.failpoints import Failpoints
from gateway.store.records import Begun, SessionChanges, StoreUnavailable
from gateway.store.sessions import Store, open_store
from gateway.store.usage_records import (
    OWN,
    Account,
    Amount,
    Spender,
    UsageQuery,
    amount_of,
    day_number,
    day_of,
    day_text,
    month_end,
    month_of,
)
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, TENANT, begin, finish, session

pytestmark = pytest.mark.anyio
ALWAYS = (0, 100_000)
USED = {"prompt_tokens": 100, "cached_tokens": 60, "output_tokens": 7}


async def turn(store: Store, turn_id: str, session_id: str = SESSION, **other: object) -> None:
    new = session(session_id, user_ref="ann")
    begun = await store.begin_turn(begin(turn_id, parent=None, session_id=session_id, create=new, key_id="tk-a"))
    assert isinstance(begun, Begun)
    told = {"usage": USED, "spender": Spender("tk-a", "small")} | other
    await store.finish_turn(finish(turn_id, begun.fence, session_id=session_id, **told))


async def lines(store: Store, *group_by: str, **where: str) -> dict[tuple[object, ...], Amount]:
    page = await store.usage(UsageQuery(TENANT, *ALWAYS, group_by, where=where))
    return {line.group: line.total("turn", "request", *OWN) for line in page.lines}


async def test_a_turn_is_booked_with_its_end_under_all_its_names(store: Store, clock: Clock) -> None:
    await turn(store, "t1")
    await turn(store, "t2")
    found = await lines(store, "day", "key", "user", "session", "model")
    assert found == {(day_of(clock.now), "tk-a", "ann", SESSION, "small"): Amount(2, 200, 120, 14)}
    assert await store.month_tokens(TENANT, "tk-a", month_of(clock.now)) == 214
    assert await store.month_tokens(TENANT, "tk-b", month_of(clock.now)) == 0


async def test_an_imported_turn_is_nobodys(store: Store) -> None:
    await turn(store, "t1", spender=None)
    assert await lines(store, "day") == {}


async def test_a_turn_told_twice_is_booked_once(store: Store) -> None:
    await turn(store, "t1")
    told = finish("t1", 1, usage=USED, spender=Spender("tk-a", "small"))
    await store.finish_turn(told)
    assert await lines(store, "session") == {(SESSION,): Amount(1, 100, 60, 7)}


async def test_a_turn_that_runs_again_counts_as_its_last_attempt(store: Store, clock: Clock) -> None:
    keyed = {"idempotency_key": "k", "request_hash": b"h", "key_id": "tk-a", "create": session()}
    for status, usage in (("failed", USED), ("incomplete", {"prompt_tokens": 9}), ("completed", {"prompt_tokens": 5})):
        begun = await store.begin_turn(begin("t1", **keyed))
        assert isinstance(begun, Begun)
        told = {"status": status, "usage": usage, "spender": Spender("tk-a", "small")}
        reason = None if status == "incomplete" else "stop"
        await store.finish_turn(finish("t1", begun.fence, finish_reason=reason, move_head=False, **told))
        clock.now += 90_000  # the attempts are days apart
    found = await lines(store, "day")
    assert [amount for amount in found.values() if amount != Amount()] == [Amount(1, 5)]


async def test_erasing_a_session_keeps_the_counts_and_takes_the_names(store: Store) -> None:
    await turn(store, "t1")
    await turn(store, "t2", "s2")
    store.note_usage(Account(TENANT, 20_000, "", "", SESSION, "small", "prefill"), Amount(1, 50))
    await store.flush_usage()
    await store.delete_session(TENANT, SESSION)
    found = await lines(store, "user", "session")
    assert found == {("", ""): Amount(2, 150, 60, 7), ("ann", "s2"): Amount(1, 100, 60, 7)}


async def test_what_is_noted_for_an_erased_session_brings_no_name_back(store: Store) -> None:
    await turn(store, "t1")
    store.note_usage(Account(TENANT, 20_000, "", "ann", SESSION, "small", "summary"), Amount(1, 50))
    await store.delete_session(TENANT, SESSION)
    await store.flush_usage()
    assert set(await lines(store, "user", "session")) == {("", "")}


async def test_a_session_that_gets_another_user_takes_its_counts_along(store: Store) -> None:
    await turn(store, "t1")
    await store.update_session(TENANT, SESSION, None, SessionChanges({"user_ref": "bob"}))
    await turn(store, "t2")
    assert await lines(store, "user") == {("bob",): Amount(2, 200, 120, 14)}


async def test_old_days_are_rolled_up_without_names(store: Store, clock: Clock) -> None:
    await turn(store, "t1")
    await turn(store, "t2", "s2")
    clock.now += 10 * 86_400
    await turn(store, "t3")
    assert await store.roll_up_usage(5 * 86_400.0) == 2
    assert await lines(store, "user", "session") == {
        ("", ""): Amount(2, 200, 120, 14),
        ("ann", SESSION): Amount(1, 100, 60, 7),
    }
    assert len(await lines(store, "day")) == 2
    assert await store.roll_up_usage(5 * 86_400.0) == 0


async def test_groups_come_in_pages_and_other_tenants_in_none(store: Store) -> None:
    for number in range(7):
        await turn(store, f"t{number}", f"s{number}")
    query = UsageQuery(TENANT, *ALWAYS, ("session", "day"), limit=3)
    seen: list[str | int] = []
    after: tuple[str | int, ...] | None = None
    for _ in range(3):
        page = await store.usage(UsageQuery(TENANT, *ALWAYS, query.group_by, after=after, limit=3))
        seen += [line.group[0] for line in page.lines]
        after = page.lines[-1].group
    assert seen == [f"s{number}" for number in range(7)]
    assert not page.more
    assert (await store.usage(UsageQuery("other", *ALWAYS))).lines == ()
    assert (await store.usage(UsageQuery(None, *ALWAYS, ("tenant",)))).lines[0].group == (TENANT,)
    assert (await store.usage(UsageQuery(TENANT, 0, 5))).lines == ()


@pytest.mark.parametrize("cursor", [("s1",), ("s1", "x"), (1, 2), ("s1", True)])
async def test_a_cursor_of_another_grouping_is_refused(store: Store, cursor: tuple[str | int, ...]) -> None:
    with pytest.raises(ValueError, match="another grouping"):
        await store.usage(UsageQuery(TENANT, *ALWAYS, ("session", "day"), after=cursor))


async def test_two_gateways_book_what_their_turns_used(url: str, clock: Clock) -> None:
    """Many sessions at once, some at both, with cancels, retries and erasures: nothing is lost, nothing twice."""
    async with open_store(url, clock=clock) as one, open_store(url, clock=clock) as other:
        chance, kept = random.Random(7), Amount()

        async def talk(nth: int) -> None:
            nonlocal kept
            for number in range(6):
                store = chance.choice((one, other))
                name = f"t{nth}-{number}"
                used = {"prompt_tokens": chance.randrange(1, 500), "output_tokens": chance.randrange(50)}
                await turn(store, name, f"s{nth}", usage=used, status=chance.choice(("completed", "incomplete")))
                kept += amount_of(used)
                free = Account(TENANT, day_of(clock.now), "tk-a", "", "", "small", "turn")
                store.note_usage(free, Amount(1, 3))
                kept += Amount(1, 3)
                if chance.random() < 0.3:
                    await store.flush_usage()
            if nth % 3 == 0:
                await one.delete_session(TENANT, f"s{nth}")

        await asyncio.gather(*(talk(nth) for nth in range(12)))
        await asyncio.gather(one.flush_usage(), other.flush_usage(), one.flush_usage())
        assert sum((await lines(one, "session")).values(), Amount()) == kept
        assert {name for (name,) in await lines(one, "session")} == {"", *(f"s{n}" for n in range(12) if n % 3)}


async def test_a_flush_whose_commit_was_not_heard_of_is_written_once(url: str, clock: Clock) -> None:
    heard: list[str] = []

    class Deaf(Failpoints):
        def hit(self, name: str) -> None:
            heard.append(name)
            if name == "after_flush_usage_commit" and heard.count(name) == 1:
                raise StoreUnavailable("the answer was lost")

    async with open_store(url, clock=clock, failpoints=Deaf()) as store:
        store.note_usage(Account(TENANT, 20_000, "tk-a", "", "", "small", "turn"), Amount(1, 5))
        with pytest.raises(StoreUnavailable):
            await store.flush_usage()
        store.note_usage(Account(TENANT, 20_000, "tk-a", "", "", "small", "turn"), Amount(1, 6))
        await store.flush_usage()
        await store.flush_usage()
        assert await lines(store, "key") == {("tk-a",): Amount(2, 11)}
        assert heard.count("after_flush_usage_commit") == 3


@given(st.integers(0, 100_000))
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
def test_days_and_months_are_the_calendars(day: int) -> None:
    assert day_number(day_text(day)) == day
    now = day * 86_400.0 + 5
    assert day_text(month_of(now)) == day_text(day)[:8] + "01"
    assert day_text(day_of(month_end(now)))[8:] == "01"
    assert 0 < day_of(month_end(now)) - month_of(now) <= 31
