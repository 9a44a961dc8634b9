"""What is counted a minute: the sliding window counter of the `limits` library, over one of its storages or ours.

    last minute  [......prev......)[...cur...  now        counted: prev x what is left of its weight + cur

Knows no tenant and no HTTP. A storage is asked to add within a limit, in one step, and how it stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import Protocol

MINUTE_S = 60
UNBOUNDED = 1 << 53  # what was used is counted, also beyond the limit
EDGE_S = 0.5  # so near to its end a window is no more corrected: it may be the next one by then


class WindowStorage(Protocol):
    """The part of the library's storages for asyncio that a sliding window counter needs."""

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool: ...

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]: ...


@dataclass(frozen=True, slots=True)
class Standing:
    """How a counter stands. `left_s`: until its window ends."""

    previous: int
    previous_left_s: float
    current: int
    left_s: float

    @property
    def used(self) -> int:
        return floor(self.previous * self.previous_left_s / MINUTE_S + self.current)

    def remaining(self, limit: int) -> int:
        return max(0, limit - self.used)

    @property
    def reset_s(self) -> float:
        """Until nothing counts any more, if nothing more comes."""
        return self.left_s + MINUTE_S if self.current > 0 else self.previous_left_s

    def wait_s(self, limit: int, amount: int) -> float | None:
        """Until `amount` more would fit, if nothing else comes. None: it never does."""
        if amount > limit:
            return None
        if self.used + amount <= limit:
            return 0.0
        room = limit - amount + 1  # what counts has to be less than this
        if self.current < room and self.previous > 0:
            return self.previous_left_s - (room - self.current) * MINUTE_S / self.previous
        return self.left_s + max(0.0, MINUTE_S - room * MINUTE_S / self.current)


@dataclass(frozen=True, slots=True)
class Taken:
    """What was added to a counter, and when its window ends (by `time.monotonic`)."""

    name: str
    amount: int
    ends_at: float


class Windows:
    def __init__(self, storage: WindowStorage, now: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._now = now

    async def take(self, name: str, limit: int, amount: int) -> tuple[Taken | None, Standing]:
        """None: it would be more than `limit` a minute, and nothing was added."""
        added = await self._storage.acquire_sliding_window_entry(name, limit, MINUTE_S, amount)
        standing = await self.standing(name)
        return Taken(name, amount, self._now() + standing.left_s) if added else None, standing

    async def standing(self, name: str) -> Standing:
        previous, previous_left_s, current, expires_s = await self._storage.get_sliding_window(name, MINUTE_S)
        left_s = min(max(expires_s - MINUTE_S, 0.0), MINUTE_S) if expires_s > 0 else float(MINUTE_S)
        return Standing(int(previous), max(0.0, float(previous_left_s)), int(current), left_s)

    async def correct(self, taken: Taken, amount: int) -> None:
        """`amount` was it in the end. What was taken too much is given back while its window lasts, and is forgotten
        with it otherwise: a later window must not be lent what an earlier one spent."""
        more = amount - taken.amount
        if more > 0 or (more < 0 and self._now() < taken.ends_at - EDGE_S):
            await self._storage.acquire_sliding_window_entry(taken.name, UNBOUNDED, MINUTE_S, more)
