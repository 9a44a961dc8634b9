"""The line before one replica: at most `limit` turns there at once, the others wait here in a fair order.

    entered --> running < limit and nobody waits --> in
            `-> waits: its tenant's turn comes (FairOrder) -> in
                      | the line is full, and this tenant's is the longest -> QueueFull (429)
                      | too long                                           -> QueueTimeout (503)
                      | the replica went away or is drained                -> Withdrawn: another replica may try
                      ` cancelled: gone at once, as if it had never come

Background work (compaction, prefill) comes last: it starts only while nobody waits, in a quarter of the places. Where
the line is full and a tenant comes who waits with less than another, the newest of the longest line makes room
(longest queue drop), so that a storm of one tenant takes no other's place. Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engines.contract import EngineOverloaded, EngineUnreachable
from gateway.fleet.fairness import FairOrder

DEFAULT_LIMIT = 64  # turns at once where neither the settings nor the engine say
BACKGROUND_SHARE = 4  # one place in so many may be taken by background work
MAX_RETRY_AFTER_S = 600.0
EWMA = 0.1  # weight of the newest turn in the mean time that a place is held


class QueueFull(EngineOverloaded):
    """The line before this replica is full, of this tenant's turns among others."""


class QueueTimeout(EngineOverloaded):
    """No place came free in time."""


class Withdrawn(EngineUnreachable):
    """It waited for a replica that takes no turns any more. No failure of the replica's."""


@dataclass(eq=False, slots=True)
class _Waiting:
    granted: asyncio.Future[None]


class ReplicaQueue:
    """One replica's line in this gateway. `clock`: seconds, monotonic."""

    def __init__(
        self,
        name: str = "",
        *,
        limit: int = DEFAULT_LIMIT,
        max_waiting: int = 1024,
        max_wait_s: float = 60.0,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.max_waiting, self.max_wait_s = max_waiting, max_wait_s
        self.running = 0  # background work included
        self.background = 0
        self.refused: Counter[str] = Counter()  # full, timeout, withdrawn: since the start
        self._told: Counter[str] = Counter()  # of these, what was counted already
        self._limit = limit
        self._clock = clock
        self._turns: FairOrder[_Waiting] = FairOrder()
        self._later: FairOrder[_Waiting] = FairOrder()  # background work
        self._idle: list[asyncio.Future[None]] = []  # who waits until nothing runs
        self._held_s = 0.0  # mean time of a turn in its place; 0: none has ended yet

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def waiting(self) -> int:
        """Turns that wait; background work is not counted."""
        return len(self._turns)

    @property
    def waiting_cost(self) -> float:
        """Of those turns together, as each was entered with it."""
        return self._turns.cost

    def take_refused(self) -> Counter[str]:
        """How many turns were sent away since this was last asked, by reason: full, timeout, withdrawn."""
        fresh = self.refused - self._told
        self._told = self.refused.copy()
        return fresh

    def admit_at_most(self, limit: int) -> None:
        """Change the limit; those who wait profit at once, those who run stay."""
        self._limit = max(1, limit)
        self._dispatch()

    def refuses(self, tenant: str) -> bool:
        """Whether a turn of this tenant would be refused now."""
        if len(self._turns) < self.max_waiting:
            return False
        return self._turns.longest()[1] <= self._turns.waiting(tenant) + 1

    def retry_after_s(self) -> float:
        """When a place may be free for one who comes then: the turns ahead, at the pace of the last ones."""
        ahead = len(self._turns) + 1
        return min(MAX_RETRY_AFTER_S, max(1.0, ahead * self._held_s / self._limit))

    @asynccontextmanager
    async def entered(
        self, tenant: str, *, cost: float = 1.0, background: bool = False, going_on: bool = False
    ) -> AsyncIterator[float]:
        """A place while the context is open -> seconds waited for it. Raises QueueFull, QueueTimeout, Withdrawn.

        `going_on`: an answer that has begun elsewhere, and whose reader waits in the middle of it: it waits for nobody.
        """
        began = self._clock()
        if going_on:
            self.running += 1
        elif not background and not self._turns and self.running < self._limit:
            self._turns.charge(tenant, cost)  # nearly always
            self.running += 1
        else:
            await self._granted(tenant, cost, background)
        entered = self._clock()
        try:
            yield max(0.0, entered - began)
        finally:
            self._leave(self._clock() - entered, background)

    def withdraw(self, why: str) -> None:
        """Send away all who wait: the replica takes nothing more."""
        for order in (self._turns, self._later):
            while order:
                self._send_away(order.pop(), Withdrawn(why, replica=self.name), "withdrawn")

    async def idle(self) -> None:
        """Until nothing runs in a place, background work included."""
        while self.running:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(ended)
            await ended

    async def _granted(self, tenant: str, cost: float, background: bool) -> None:
        entry = _Waiting(asyncio.get_running_loop().create_future())
        order = self._later if background else self._turns
        if not background and self.running >= self._limit:
            self._make_room(tenant)
        order.push(tenant, entry, cost)
        self._dispatch()
        try:
            async with asyncio.timeout(None if background else self.max_wait_s):
                await entry.granted
        except TimeoutError as error:
            if self._let_go(order, tenant, entry):
                self.refused["timeout"] += 1
                raise QueueTimeout(
                    f"no place at {self.name} came free within {self.max_wait_s:g} s",
                    retry_after_s=self.retry_after_s(),
                    replica=self.name,
                ) from error
        except asyncio.CancelledError:
            if not self._let_go(order, tenant, entry) and not entry.granted.cancelled():
                self._leave(None, background)  # its place had just come
            raise

    def _let_go(self, order: FairOrder[_Waiting], tenant: str, entry: _Waiting) -> bool:
        """Whether it still waited. A grant that came in the same moment stands; an exception too is no place."""
        return order.discard(tenant, entry) or (entry.granted.done() and not _holds(entry.granted))

    def _make_room(self, tenant: str) -> None:
        """Raises QueueFull where this tenant's line is the longest; else the longest line gives its newest."""
        if len(self._turns) < self.max_waiting:
            return
        longest, entries = self._turns.longest()
        if entries <= self._turns.waiting(tenant) + 1:
            self.refused["full"] += 1
            raise self._full()
        pushed_out = self._turns.newest(longest)
        self._turns.discard(longest, pushed_out)
        self._send_away(pushed_out, self._full(), "full")

    def _full(self) -> QueueFull:
        message = f"{len(self._turns)} turns wait for {self.name} already; at most {self.max_waiting} may"
        return QueueFull(message, retry_after_s=self.retry_after_s(), replica=self.name)

    def _send_away(self, entry: _Waiting, error: Exception, why: str) -> None:
        if not entry.granted.done():
            self.refused[why] += 1
            entry.granted.set_exception(error)

    def _dispatch(self) -> None:
        while self.running < self._limit:
            if self._turns:
                entry, background = self._turns.pop(), False
            elif self._later and self.background < max(1, self._limit // BACKGROUND_SHARE):
                entry, background = self._later.pop(), True
            else:
                return
            if not entry.granted.done():
                self.running += 1
                self.background += background
                entry.granted.set_result(None)

    def _leave(self, held_s: float | None, background: bool) -> None:
        self.running -= 1
        self.background -= background
        if held_s is not None and not background:
            self._held_s = held_s if not self._held_s else (1 - EWMA) * self._held_s + EWMA * held_s
        self._dispatch()
        if not self.running:
            self._turns.rest()
            self._later.rest()
            for ended in self._idle:
                if not ended.done():
                    ended.set_result(None)
            self._idle.clear()


def _holds(granted: asyncio.Future[None]) -> bool:
    return granted.done() and not granted.cancelled() and granted.exception() is None
