"""What a tenant, or a key, has used of what does not come back by the minute: tokens of the month, bytes stored.

Read from the database at most every few seconds, and what this gateway lets through meanwhile is added to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.store.limit_records import Holder
from gateway.store.sessions import Store
from gateway.store.usage_records import month_of

FRESH_S = 3.0  # a sum is read again after this long


@dataclass(frozen=True, slots=True)
class _Read:
    at: float
    value: int


class Quotas:
    """`clock`: seconds since 1970."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._read: dict[tuple[str, Holder], _Read] = {}
        self._running: Counter[Holder] = Counter()  # tokens that running turns may use yet
        self._since: Counter[Holder] = Counter()  # tokens of turns that ended after the ledger was read

    async def month_tokens(self, holder: Holder) -> int:
        """Used this month, running turns at their most."""

        async def read() -> int:
            self._since[holder] = 0
            month = month_of(self._clock())
            return await self._store.month_tokens(holder.tenant_id, holder.key_id or None, month)

        return await self._sum("month", holder, read) + self._running[holder] + self._since[holder]

    async def stored_bytes(self, holder: Holder) -> int:
        return await self._sum("bytes", holder, lambda: self._store.stored_bytes(holder))

    def begun(self, holder: Holder, tokens: int) -> None:
        self._running[holder] += tokens

    def ended(self, holder: Holder, tokens: int, used: int) -> None:
        """A turn that `begun` told of with `tokens`, and that used `used`."""
        self._running[holder] -= tokens
        self._since[holder] += used
        if self._running[holder] <= 0:
            del self._running[holder]

    def forget(self) -> None:
        """Limits have changed: read all anew."""
        self._read.clear()

    async def _sum(self, what: str, holder: Holder, read: Callable[[], Awaitable[int]]) -> int:
        known, now = self._read.get((what, holder)), self._clock()
        if known is None or not 0 <= now - known.at <= FRESH_S:
            known = self._read[what, holder] = _Read(now, await read())
        return known.value
