"""Where limits are counted: this gateway's memory, the database, or a Redis that the settings name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from limits.aio.storage import MemoryStorage
from limits.aio.storage.base import SlidingWindowCounterSupport

from gateway.limits.slots import DatabaseSlots, MemorySlots, Slots
from gateway.limits.windows import MINUTE_S, Windows
from gateway.store.records import StoreUnavailable
from gateway.store.sessions import Store

PREFIX = "turnkeep"


@dataclass(frozen=True, slots=True)
class Counters:
    """`gone`: what is raised when the place where they count does not answer."""

    windows: Windows
    slots: Slots
    gone: tuple[type[Exception], ...]


class DatabaseWindows(SlidingWindowCounterSupport):
    """A storage for the library's sliding window counter, in the gateways' database. Windows begin with the minutes."""

    base_exceptions = StoreUnavailable
    wrap_exceptions = False

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        if amount > limit:
            return False
        window, into = divmod(self._clock(), expiry)
        return await self._store.add_within(key, int(window), 1 - into / expiry, limit, amount)

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        window, into = divmod(self._clock(), expiry)
        previous, current = await self._store.read_counter(key, int(window))
        left_s = expiry - into
        return previous, left_s if previous else 0.0, current, left_s + expiry

    async def clear_sliding_window(self, key: str, expiry: int) -> None:
        await self._store.clear_counter(key)


def window_of(now: float) -> int:
    return int(now // MINUTE_S)


@asynccontextmanager
async def open_counters(
    where: str, store: Store, clock: Callable[[], float], *, lease_s: float
) -> AsyncIterator[Counters]:
    """`where`: "memory", "database" or a URL redis://… (rediss://, unix). Connects at first use."""
    if where == "memory":
        yield Counters(Windows(MemoryStorage()), MemorySlots(), ())
    elif where == "database":
        yield Counters(Windows(DatabaseWindows(store, clock)), DatabaseSlots(store, lease_s), (StoreUnavailable,))
    else:
        from gateway.limits.redis import redis_counters

        async with redis_counters(where, lease_s) as counters:
            yield counters
