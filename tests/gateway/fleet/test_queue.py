"""The line before a replica: bounded, fair, left at once by whoever is cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from gateway.fleet.queue import BACKGROUND_SHARE, QueueFull, QueueTimeout, ReplicaQueue, Withdrawn
from tests.gateway.fleet.test_fairness import jain

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def line(**more: float) -> tuple[ReplicaQueue, Clock]:
    clock = Clock()
    given = {"limit": 2, "max_waiting": 4, "max_wait_s": 30.0, **more}
    return ReplicaQueue("a", clock=clock, **given), clock  # type: ignore[arg-type]


class Turn:
    """One who comes, waits, and leaves when told."""

    def __init__(self, queue: ReplicaQueue, tenant: str, **more: bool) -> None:
        self.waited_s: float | None = None
        self._done = asyncio.Event()
        self.task = asyncio.create_task(self._go(queue, tenant, more))

    async def _go(self, queue: ReplicaQueue, tenant: str, more: dict[str, bool]) -> None:
        async with queue.entered(tenant, **more) as self.waited_s:
            await self._done.wait()

    @property
    def inside(self) -> bool:
        return self.waited_s is not None and not self.task.done()

    async def leave(self) -> None:
        self._done.set()
        await self.task
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_at_most_so_many_run_and_the_next_comes_in_when_one_leaves() -> None:
    queue, clock = line()
    turns = [Turn(queue, "t") for _ in range(4)]
    await settled()
    assert [turn.inside for turn in turns] == [True, True, False, False]
    assert (queue.running, queue.waiting) == (2, 2)
    clock.now = 3.0
    await turns[0].leave()
    assert (turns[2].inside, turns[2].waited_s) == (True, 3.0)
    for turn in turns[1:]:
        await turn.leave()
    assert (queue.running, queue.waiting) == (0, 0)


async def test_a_storm_of_one_tenant_leaves_four_others_their_share() -> None:
    queue, _ = line(limit=4, max_waiting=10_000)
    storm = [Turn(queue, "storm") for _ in range(400)]
    others = {name: [Turn(queue, name) for _ in range(20)] for name in "abcd"}
    every = {"storm": storm, **others}
    await settled()
    served: Counter[str] = Counter()
    for _ in range(100):
        name, turn = next((n, t) for n, turns in every.items() for t in turns if t.inside)
        served[name] += 1
        await turn.leave()
    shares = [float(served[name]) for name in every]
    assert jain(shares) > 0.95, served  # a plain line: 0.2
    assert min(served.values()) >= 15
    for turns in every.values():
        for turn in turns:
            turn.task.cancel()
    await settled()
    assert (queue.running, queue.waiting) == (0, 0)


async def test_where_the_line_is_full_the_longest_makes_room_and_is_told_when_to_come_again() -> None:
    queue, clock = line(limit=1, max_waiting=3)
    first = Turn(queue, "storm")
    await settled()
    clock.now = 8.0
    await first.leave()  # a turn takes 8 s here
    storm = [Turn(queue, "storm") for _ in range(4)]
    await settled()
    assert queue.refuses("storm")
    assert not queue.refuses("other")
    over = Turn(queue, "storm")
    with pytest.raises(QueueFull) as refused:
        await over.task
    assert refused.value.retry_after_s == 32.0  # three before it and it, one at a time
    other = Turn(queue, "other")
    await settled()
    with pytest.raises(QueueFull):
        await storm[3].task  # the newest of the longest
    await storm[0].leave()
    assert other.inside, "it came last, and has had nothing yet"
    for turn in (other, storm[1], storm[2]):
        await turn.leave()
    assert queue.refused == {"full": 2}
    assert queue.take_refused() == {"full": 2}
    assert queue.take_refused() == {}


async def test_whoever_is_cancelled_leaves_the_line_at_once() -> None:
    queue, _ = line(limit=1)
    held, gone, kept = (Turn(queue, name) for name in ("a", "b", "c"))
    await settled()
    gone.task.cancel()
    await settled()
    assert queue.waiting == 1
    await held.leave()
    assert kept.inside
    await kept.leave()
    assert queue.running == 0


async def test_a_place_that_came_in_the_moment_of_a_cancel_goes_to_the_next() -> None:
    queue, _ = line(limit=1)
    held, gone, kept = (Turn(queue, name) for name in ("a", "b", "c"))
    await settled()
    held._done.set()
    await asyncio.sleep(0)  # the place is given, and not yet taken
    gone.task.cancel()
    await settled()
    assert kept.inside
    await kept.leave()
    assert (queue.running, queue.waiting) == (0, 0)


async def test_several_places_come_free_faster() -> None:
    queue, clock = line(limit=4)
    first = Turn(queue, "a")
    await settled()
    clock.now = 10.0
    await first.leave()  # a turn takes 10 s here
    turns = [Turn(queue, "a") for _ in range(4 + 3)]
    await settled()
    assert (queue.running, queue.waiting) == (4, 3)
    assert queue.retry_after_s() == 10.0  # the fourth who waits, four at once
    for turn in turns:
        turn.task.cancel()
    await settled()


async def test_whoever_waits_too_long_is_told_so() -> None:
    queue, _ = line(limit=1, max_wait_s=0.02)
    held = Turn(queue, "a")
    await settled()
    with pytest.raises(QueueTimeout) as refused:
        await Turn(queue, "b").task
    assert (refused.value.retry_after_s or 0) >= 1
    assert queue.waiting == 0
    await held.leave()


async def test_background_work_comes_last_and_takes_a_quarter_at_most() -> None:
    queue, _ = line(limit=2 * BACKGROUND_SHARE)
    later = [Turn(queue, "t", background=True) for _ in range(5)]
    await settled()
    assert [turn.inside for turn in later] == [True, True, False, False, False]
    assert queue.waiting == 0, "background work is not counted as turns"
    turns = [Turn(queue, "t") for _ in range(7)]
    await settled()
    assert [turn.inside for turn in turns] == [True] * 6 + [False]
    await later[0].leave()
    assert turns[6].inside
    assert not later[2].inside
    for turn in turns:
        await turn.leave()
    assert [turn.inside for turn in later[1:]] == [True, True, False, False]
    for turn in later[1:]:
        await turn.leave()
    await queue.idle()


async def test_all_who_wait_are_sent_elsewhere_when_the_replica_goes() -> None:
    queue, _ = line(limit=1)
    held, turn, later = Turn(queue, "a"), Turn(queue, "b"), Turn(queue, "c", background=True)
    await settled()
    queue.withdraw("it is drained")
    for sent in (turn, later):
        with pytest.raises(Withdrawn, match="drained"):
            await sent.task
    assert held.inside
    await held.leave()


async def test_a_larger_limit_lets_in_who_waits() -> None:
    queue, _ = line(limit=1)
    turns = [Turn(queue, "a") for _ in range(3)]
    await settled()
    queue.admit_at_most(3)
    await settled()
    assert all(turn.inside for turn in turns)
    for turn in turns:
        await turn.leave()


async def test_an_answer_that_goes_on_here_waits_for_nobody() -> None:
    queue, _ = line(limit=1, max_waiting=1)
    held, waits = Turn(queue, "a"), Turn(queue, "a")
    await settled()
    onward = Turn(queue, "a", going_on=True)
    await settled()
    assert (onward.inside, waits.inside, queue.running) == (True, False, 2)
    await held.leave()
    assert not waits.inside, "the limit counts both"
    await onward.leave()
    assert waits.inside
    await waits.leave()
    assert queue.running == 0
