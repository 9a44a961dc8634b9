"""Placement is a plain function: pins, restarts, load, failover."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from typing import Any

import pytest

from engines.contract import Capabilities, EngineLoad, EngineTimeout, EngineUnreachable
from engines.echo import EchoEngine
from gateway.fleet.chain import extend, root
from gateway.fleet.cost import QUEUE, Candidate
from gateway.fleet.outlook import Outlook, Path, path_of
from gateway.fleet.placement import Pin, Placement, choose
from gateway.fleet.queue import Withdrawn
from gateway.fleet.replica import REST_S, Replica

EMPTY = Path(0)
CAPS = Capabilities(kind="echo", models=("echo",), takes_ids=True, epoch="e1")


def replica(name: str, **more: object) -> Replica:
    made = Replica(EchoEngine(name=name), url=name, capabilities=CAPS, healthy=True)
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def placed_on(
    *replicas: Replica,
    pin: Pin | None = None,
    path: Path = EMPTY,
    tried: tuple[str, ...] = (),
    outlook: Outlook | None = None,
) -> Placement | None:
    return choose(
        replicas, model="echo", pin=pin, path=path, outlook=outlook or Outlook(), now=0.0, at=0.0, key=b"k", tried=tried
    )


def test_a_session_stays_where_its_cache_is_even_when_another_replica_is_idle() -> None:
    busy = replica("a", in_flight=5)
    placed = placed_on(busy, replica("b"), pin=Pin("a", "e1"), path=Path(100, 100))
    assert placed is not None
    assert (placed.replica.name, placed.reason, placed.expected_cached_tokens) == ("a", "pinned", 100)


def test_a_restarted_replica_is_expected_to_have_nothing_cached() -> None:
    placed = placed_on(replica("a"), pin=Pin("a", "e0"), path=Path(100, 100))
    assert placed is not None
    assert (placed.reason, placed.expected_cached_tokens) == ("pinned", 0)


def test_of_a_home_that_erred_less_is_expected() -> None:
    outlook = Outlook()
    outlook.joined("a", model="echo", capacity_tokens=None, block_tokens=32)
    outlook.held["a"].right = 0.5
    placed = placed_on(replica("a"), pin=Pin("a", "e1"), path=Path(100, 100), outlook=outlook)
    assert placed is not None
    assert placed.expected_cached_tokens == 50


def test_a_new_session_goes_where_the_least_work_is() -> None:
    loaded, outlook = replica("a", load=EngineLoad(waiting=3)), Outlook()
    for name in "ab":
        outlook.joined(name, model="echo", capacity_tokens=None, block_tokens=32)
    placed = placed_on(loaded, replica("b"), outlook=outlook)
    assert placed is not None
    assert (placed.replica.name, placed.reason) == ("b", "least_cost")


def test_a_pin_that_is_away_is_named_as_the_reason() -> None:
    gone = replica("a", healthy=False)
    placed = placed_on(gone, replica("b"), pin=Pin("a", "e1"), path=Path(9, 9))
    assert placed is not None
    assert (placed.replica.name, placed.reason, placed.expected_cached_tokens) == ("b", "pin_unavailable", 0)


@pytest.mark.parametrize("state", [{"draining": True}, {"healthy": False}, {"rest_until": 5.0}, {"capabilities": None}])
def test_nobody_who_cannot_take_it_is_chosen(state: dict[str, object]) -> None:
    assert placed_on(replica("a", **state)) is None


def test_failover_never_asks_the_same_replica_twice() -> None:
    placed = placed_on(replica("a"), replica("b"), pin=Pin("a", "e1"), path=Path(9, 9), tried=("a",))
    assert placed is not None
    assert (placed.replica.name, placed.reason) == ("b", "failover")
    assert placed_on(replica("a"), tried=("a",)) is None


def test_a_lost_connection_rests_a_replica_at_once_and_refusals_only_after_three() -> None:
    lost = replica("a")
    lost.failed(EngineUnreachable("gone"), now=1.0, lost=True)
    assert not lost.available(1.0)
    assert lost.rest_until == 1.0 + REST_S
    slow = replica("b")
    for _ in range(2):
        slow.failed(EngineTimeout("late", stage="first_delta"), now=1.0, lost=False)
    assert slow.available(1.0)
    slow.failed(EngineTimeout("late", stage="first_delta"), now=1.0, lost=False)
    assert not slow.available(10.0)


IDS = b"".join(number.to_bytes(4, "little") for number in range(200))
ROOT = root(salt="", model="echo")


def two_replicas() -> Outlook:
    outlook = Outlook()
    for name in "ab":
        outlook.joined(name, model="echo", capacity_tokens=4096, block_tokens=32)
    return outlook


def test_a_new_session_goes_where_the_beginning_of_its_prompt_lies() -> None:
    outlook = two_replicas()
    with outlook.sending("b", "t1", path_of(ROOT, IDS[: 4 * 100]), 0, 0.0) as sending:
        sending.ended(None, b"", 0.0)
    placed = placed_on(replica("a"), replica("b"), path=path_of(ROOT, IDS), outlook=outlook)
    assert placed is not None
    assert (placed.replica.name, placed.reason, placed.expected_cached_tokens) == ("b", "cached", 96)
    assert placed.as_json()["costs"] == placed.costs


def test_the_next_turn_is_expected_to_find_its_whole_path_to_the_token() -> None:
    outlook = two_replicas()
    path = path_of(ROOT, IDS[: 4 * 100])
    with outlook.sending("a", "t1", path, 0, 0.0) as sending:
        sending.ended(None, IDS[: 4 * 7], 1.0)
    end = extend(path.end, IDS[: 4 * 7])[0]
    placed = placed_on(
        replica("a"), replica("b"), pin=Pin("a", "e1"), path=path_of(end, IDS[: 4 * 30]), outlook=outlook
    )
    assert placed is not None
    assert (placed.reason, placed.expected_cached_tokens) == ("pinned", 107)


def test_what_a_gateway_never_saw_is_believed_of_the_pin_alone() -> None:
    placed = placed_on(
        replica("a"),
        replica("b"),
        pin=Pin("a", "e1"),
        path=Path(90, 80, extend(ROOT, IDS[: 4 * 80])[0]),
        outlook=two_replicas(),
    )
    assert placed is not None
    assert (placed.replica.name, placed.expected_cached_tokens) == ("a", 80)


class Counting(Outlook):
    """Counts how often a replica is priced, and how often only its cache is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.priced, self.looked = 0, 0

    def candidate(self, *given: Any, **more: Any) -> Candidate:
        self.priced += 1
        return super().candidate(*given, **more)

    def cached(self, *given: Any, **more: Any) -> float:
        self.looked += 1
        return super().cached(*given, **more)


def counting(*names: str) -> Counting:
    outlook = Counting()
    for name in names:
        outlook.joined(name, model="echo", capacity_tokens=4096, block_tokens=32)
        outlook.traffic[name].given(1000, 0.0)
    return outlook


def test_a_turn_that_stays_with_its_pin_prices_no_replica() -> None:
    names = [f"r{number}" for number in range(16)]
    outlook, pin, path = counting(*names), Pin("r3", "e1"), Path(900, 800, extend(ROOT, IDS)[0])
    replicas = [replica(name) for name in names]
    placed = placed_on(*replicas, pin=pin, path=path, outlook=outlook)
    assert placed is not None
    assert (placed.replica.name, placed.reason, placed.costs) == ("r3", "pinned", {})
    assert (outlook.priced, outlook.looked) == (0, 1)
    outlook.traffic["r3"].given(200_000, 0.0)
    placed = placed_on(*replicas, pin=pin, path=path, outlook=outlook)
    assert placed is not None
    assert (placed.reason, len(placed.costs), outlook.priced) == ("pin_over_bound", 16, 16)


async def line(replica: Replica, turns: int, stack: AsyncExitStack) -> None:
    """So many turns wait for it, of 1,000 tokens each."""
    replica.queue.admit_at_most(1)
    await stack.enter_async_context(replica.queue.entered("t"))

    async def wait() -> None:
        async with replica.queue.entered("t", cost=1000.0):
            pass

    tasks = [asyncio.create_task(wait()) for _ in range(turns)]
    stack.push_async_callback(asyncio.gather, *tasks, return_exceptions=True)
    stack.callback(replica.queue.withdraw, "the test is over")
    await asyncio.sleep(0)


@pytest.mark.anyio
async def test_turns_that_wait_for_a_replica_are_work_ahead_of_it() -> None:
    a, b, outlook = replica("a"), replica("b"), counting("a", "b")
    async with AsyncExitStack() as stack:
        await line(a, 20, stack)
        assert (a.queued, a.queued_tokens) == (20, 20_000.0)
        placed = placed_on(a, b, path=Path(100), outlook=outlook)
        left = placed_on(a, b, pin=Pin("a", "e1"), path=Path(100, 100), outlook=outlook)
        few = placed_on(a, b, pin=Pin("a", "e1"), path=Path(30_000, 30_000), outlook=outlook)
    assert placed is not None
    assert (placed.replica.name, placed.reason) == ("b", "least_cost")
    assert placed.costs["a"] > placed.costs["b"] + 20_000 * QUEUE
    assert left is not None
    assert (left.replica.name, left.reason) == ("b", "pin_over_bound")
    assert few is not None
    assert (few.replica.name, few.reason) == ("a", "pinned")  # what it has cached there is worth the wait
    assert (a.queued, a.queued_tokens) == (0, 0.0)


async def another(replica: Replica) -> int:
    async with replica.taken("t"):
        return replica.in_flight


@pytest.mark.anyio
async def test_a_replica_on_trial_has_one_turn_at_most_whatever_was_placed_there_before() -> None:
    tried = replica("a", half_open=True)
    assert tried.available(0.0)  # two turns are placed there, then both go
    async with tried.taken("t"):
        assert not tried.available(0.0)
        with pytest.raises(Withdrawn, match="on trial"):
            async with tried.taken("t", going_on=True):
                raise AssertionError("a second turn runs there")
        assert (tried.trials, tried.in_flight, tried.queue.running) == (1, 1, 1)
        tried.answered(1.0)
        assert await asyncio.create_task(another(tried)) == 2
    assert (tried.trials, tried.in_flight, tried.queue.running) == (0, 0, 0)
