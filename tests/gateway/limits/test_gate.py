"""Who is let through, wherever it is counted: never more than may, also for two gateways at once; all comes back."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from gateway.errors import Forbidden, GatewayError, RateLimited, Unavailable
from gateway.limits.admission import Admission
from gateway.limits.counters import open_counters
from gateway.limits.gate import Gate
from gateway.limits.told import Told
from gateway.store.limit_records import Bound, Holder, Limits
from gateway.store.records import TooManySessions
from gateway.store.sessions import Store, open_store
from tests.gateway.store.conftest import EMPTY, say
from tests.gateway.store.values import TENANT, session, talk

pytestmark = pytest.mark.anyio
KEY = "tk-a"
WHERE = ["memory", "database", pytest.param("postgresql", marks=pytest.mark.postgres), "redis"]
SHARED = WHERE[1:]


class Place:
    """Where gateways count, and how to open one more of them."""

    def __init__(self, where: str, url: str, stack: AsyncExitStack) -> None:
        self.where, self.url, self.stack = where, url, stack
        self.seen: list[str] = []
        self.blind: list[int] = []

    async def gateway(self, *, blind_refuses: bool = True, lease_s: float = 10.0) -> tuple[Gate, Store]:
        enter = self.stack.enter_async_context
        store = await enter(open_store(self.url, synchronous="NORMAL"))
        counters = await enter(open_counters(self.where, store, time.time, lease_s=lease_s))
        told: dict[str, Any] = {"refused": self.seen.append, "blind": lambda: self.blind.append(1)}
        gate = Gate(store, counters, clock=time.time, renew_s=0.2, blind_refuses=blind_refuses, **told)
        await enter(gate.open())
        return gate, store


@pytest.fixture
def spot(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """(where it is counted, the database)"""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("migrated_postgres")
        asyncio.run(say(url, EMPTY))
        return "database", url
    shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "turnkeep.db")
    where: str = request.param
    if where == "redis":
        where = request.getfixturevalue("redis_url")
        redis.Redis.from_url(where).flushall()
    return where, f"sqlite:///{tmp_path}/turnkeep.db"


@pytest.fixture
async def place(spot: tuple[str, str]) -> AsyncIterator[Place]:
    """Within one minute of the clock, by which windows begin in memory and in a database."""
    if (left_s := 60 - time.time() % 60) < 8:
        await asyncio.sleep(left_s + 0.1)
    async with AsyncExitStack() as stack:
        yield Place(*spot, stack)


async def limit(gate: Gate, store: Store, key: str = "", **limits: int) -> None:
    await store.set_limits(Holder(TENANT, key), Limits(**limits))
    await gate.refresh()


async def outcomes(gates: list[Gate], count: int, tokens: int = 10) -> list[Admission | GatewayError | None]:
    """Of so many turns at once, at each gateway in turn."""
    asked = (gates[nth % len(gates)].admit(TENANT, KEY, tokens) for nth in range(count))
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, Admission | GatewayError | None) for one in found), found
    return list(found)  # type: ignore[arg-type]


def through(found: list[Admission | GatewayError | None]) -> list[Admission]:
    return [one for one in found if isinstance(one, Admission)]


async def until(condition: Callable[[], object]) -> None:
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to that within 15 s")


@pytest.mark.parametrize("spot", WHERE, indirect=True)
async def test_requests_a_minute(place: Place) -> None:
    gate, store = await place.gateway()
    await limit(gate, store, requests_per_minute=5)
    found = await outcomes([gate], 12)
    assert len(through(found)) == 5
    refused = [one for one in found if isinstance(one, RateLimited)]
    assert len(refused) == 7
    assert {one.code for one in refused} == {"rate_limit_exceeded"}
    assert all(one.retry_after_s is not None and 0 < one.retry_after_s <= 120 for one in refused)
    assert place.seen == ["requests_per_minute"] * 7
    assert await gate.admit("other", KEY, 10) is None


@pytest.mark.parametrize("spot", WHERE, indirect=True)
async def test_tokens_are_reserved_and_then_what_they_were(place: Place) -> None:
    gate, store = await place.gateway()
    await limit(gate, store, tokens_per_minute=1000)
    first = await gate.admit(TENANT, KEY, 900)
    with pytest.raises(RateLimited) as refused:
        await gate.admit(TENANT, KEY, 200)
    assert refused.value.details == {
        "name": "tokens_per_minute",
        "of": "tenant",
        "limit": 1000,
        "used": 900,
        "requested": 200,
    }
    gate.end(first, used=100)
    told = Told()
    await until(lambda: not gate._tasks)  # what is given back is so soon, not at once
    assert await gate.admit(TENANT, KEY, 890, told) is not None
    assert told.kinds["tokens"].remaining <= 100
    with pytest.raises(RateLimited) as too_long:
        await gate.admit(TENANT, KEY, 1001)
    assert too_long.value.retry_after_s is None


@pytest.mark.parametrize("spot", WHERE, indirect=True)
async def test_the_key_and_its_tenant_both_have_to_fit_and_a_refusal_takes_nothing(place: Place) -> None:
    gate, store = await place.gateway()
    await limit(gate, store, requests_per_minute=100, concurrent_turns=100)
    await limit(gate, store, KEY, concurrent_turns=1, tokens_per_minute=1000)
    found = await outcomes([gate], 8)
    assert len(through(found)) == 1
    told = Told()
    await until(lambda: not gate._tasks)
    other = await gate.admit(TENANT, "tk-b", 10, told)
    assert other is not None
    assert told.kinds["requests"].remaining == 98  # the two that were let through
    gate.give_back(through(found)[0])
    await until(lambda: not gate._tasks)
    assert len(through(await outcomes([gate], 3, tokens=1000))) == 1


@pytest.mark.parametrize("spot", SHARED, indirect=True)
async def test_turns_at_once_of_two_gateways_are_never_more_than_may(place: Place) -> None:
    one, store = await place.gateway()
    other, _ = await place.gateway()
    await limit(one, store, concurrent_turns=4)
    await other.refresh()
    running, most = 0, 0

    async def turn(nth: int) -> bool:
        nonlocal running, most
        gate = (one, other)[nth % 2]
        held = None
        with suppress(RateLimited, Unavailable):
            held = await gate.admit(TENANT, KEY, 10)
        if held is None:
            return False
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.2)
        running -= 1
        gate.end(held, used=5)
        return True

    passed = 0
    for _ in range(5):
        passed += sum(await asyncio.gather(*(turn(nth) for nth in range(24))))
        await until(lambda: not one._tasks and not other._tasks)
    assert most == 4
    assert passed >= 20
    await until(lambda: not one._tasks and not other._tasks)
    assert len(through(await outcomes([one, other], 20))) == 4


@pytest.mark.parametrize("spot", SHARED, indirect=True)
async def test_requests_and_tokens_of_two_gateways_are_one_count(place: Place) -> None:
    one, store = await place.gateway()
    other, _ = await place.gateway()
    await limit(one, store, requests_per_minute=9, tokens_per_minute=70)
    await other.refresh()
    assert len(through(await outcomes([one, other], 30))) == 7


@pytest.mark.parametrize("spot", SHARED, indirect=True)
async def test_the_slots_of_a_gateway_that_died_lapse_and_those_of_one_that_lives_do_not(place: Place) -> None:
    one, store = await place.gateway(lease_s=2.0)
    other, _ = await place.gateway(lease_s=2.0)
    await limit(one, store, concurrent_turns=2)
    await other.refresh()
    kept, lost = await one.admit(TENANT, KEY, 10), await other.admit(TENANT, KEY, 10)
    assert kept is not None
    assert lost is not None
    other._held.clear()  # it holds on to nothing any more
    for _ in range(150):
        if through(await outcomes([one], 1)):
            break
        await asyncio.sleep(0.1)
    else:
        raise AssertionError("the slot of the dead gateway did not lapse")
    await asyncio.sleep(2.5)  # longer than a slot is good by itself
    assert through(await outcomes([one], 4)) == []


@pytest.mark.parametrize("spot", SHARED, indirect=True)
async def test_a_turn_that_is_handed_over_keeps_its_slot(place: Place) -> None:
    one, store = await place.gateway()
    other, _ = await place.gateway()
    await limit(one, store, concurrent_turns=1)
    await other.refresh()
    held = await one.admit(TENANT, KEY, 10)
    assert held is not None
    moved = Admission.of_json(held.as_json())
    one.hand_over(held)
    await other.adopt(moved)
    assert through(await outcomes([one, other], 6)) == []
    other.end(moved, used=3)
    await until(lambda: not other._tasks)
    assert len(through(await outcomes([one], 1))) == 1


async def month(gate: Gate, used: int) -> GatewayError | None:
    found = (await asyncio.gather(gate.admit(TENANT, KEY, used), return_exceptions=True))[0]
    assert not isinstance(found, Exception) or isinstance(found, GatewayError)
    return found if isinstance(found, GatewayError) else None


@pytest.mark.parametrize("spot", ["memory"], indirect=True)
async def test_the_months_tokens_count_what_runs_and_what_was_booked(place: Place) -> None:
    gate, store = await place.gateway()
    await limit(gate, store, month_tokens=1000)
    first = await gate.admit(TENANT, KEY, 600)
    refused = await month(gate, 600)
    assert refused is not None
    assert (refused.status, refused.code) == (429, "insufficient_quota")
    assert refused.retry_after_s is not None
    assert 0 < refused.retry_after_s <= 31 * 86_400
    gate.end(first, used=300)
    assert await month(gate, 600) is None
    assert await month(gate, 200) is not None


@pytest.mark.parametrize("spot", ["memory"], indirect=True)
async def test_bytes_that_are_stored(place: Place) -> None:
    gate, store = await place.gateway()
    await limit(gate, store, stored_bytes=50)
    assert await month(gate, 10) is None
    await talk(store, "t1")
    await limit(gate, store, stored_bytes=51)  # what was read is forgotten with the change
    refused = await month(gate, 10)
    assert isinstance(refused, Forbidden)
    assert refused.code == "storage_limit_exceeded"
    assert refused.details["used"] == await store.stored_bytes(Holder(TENANT))
    with pytest.raises(Forbidden):
        await gate.check_stored(TENANT, KEY)


@pytest.mark.parametrize("spot", ["memory"], indirect=True)
async def test_a_limit_of_another_gateway_is_heeded_within_seconds(place: Place) -> None:
    gate, _ = await place.gateway()
    _, store = await place.gateway()
    assert await gate.admit(TENANT, KEY, 10) is None
    await store.set_limits(Holder(TENANT), Limits(requests_per_minute=0))
    await until(lambda: gate.limits_of(TENANT, KEY))
    with pytest.raises(RateLimited):
        await gate.admit(TENANT, KEY, 10)
    await store.set_limits(Holder(TENANT), Limits())
    await until(lambda: not gate.limits_of(TENANT, KEY))
    assert await gate.admit(TENANT, KEY, 10) is None


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("spot", ["memory"], indirect=True)
async def test_without_the_place_where_it_counts_requests_pass_or_not_by_the_setting(
    place: Place, refuses: bool
) -> None:
    place.where = "redis://127.0.0.1:1/0"  # nobody listens there
    gate, store = await place.gateway(blind_refuses=refuses)
    await limit(gate, store, requests_per_minute=1, concurrent_turns=1)
    for _ in range(3):
        if refuses:
            with pytest.raises(Unavailable) as refused:
                await gate.admit(TENANT, KEY, 10)
            assert refused.value.code == "limits_unavailable"
        else:
            gate.end(await gate.admit(TENANT, KEY, 10), used=1)
    assert len(place.blind) == 3


@pytest.mark.parametrize("spot", SHARED, indirect=True)
async def test_windows_that_are_over_are_swept(place: Place) -> None:
    gate, store = await place.gateway()
    await limit(gate, store, requests_per_minute=5, concurrent_turns=5)
    await gate.admit(TENANT, KEY, 10)
    await store.sweep_counts(1 << 40)
    assert await store.read_counter(f"requests/{Holder(TENANT)}", int(time.time() // 60)) == (0, 0)


async def test_sessions_are_counted_by_tenant_and_by_key(url: str) -> None:
    async with open_store(url) as store:
        bounds = (Bound(Holder(TENANT), 3), Bound(Holder(TENANT, KEY), 2))
        for nth in range(2):
            await store.create_session(session(f"s{nth}", key_id=KEY, bounds=bounds))
        with pytest.raises(TooManySessions) as of_key:
            await store.create_session(session("s2", key_id=KEY, bounds=bounds))
        assert (of_key.value.bound.holder.key_id, of_key.value.stored) == (KEY, 2)
        await store.create_session(session("s2", key_id="tk-b", bounds=bounds[:1]))
        with pytest.raises(TooManySessions):
            await store.create_session(session("s3", key_id="tk-b", bounds=bounds[:1]))
        assert await store.get_session(TENANT, "s3") is None
        await store.delete_session(TENANT, "s0")
        await store.create_session(session("s3", key_id=KEY, bounds=bounds))
