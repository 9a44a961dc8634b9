"""Turns that run at once: a slot for each, of every holder that has a bound. Exact, whoever asks at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from gateway.store.limit_records import Holder
from gateway.store.sessions import Store


class Slots(Protocol):
    """`shared`: other gateways see them, and they lapse where they are not held on to."""

    shared: bool

    async def take(self, wanted: Sequence[tuple[Holder, int]], id: str) -> tuple[Holder, int] | None:
        """A slot of each holder for `id`, or none at all: then which holder has how many already."""
        ...

    async def hold(self, held: Sequence[tuple[Holder, str]]) -> None: ...

    async def free(self, holders: Sequence[Holder], id: str) -> None: ...


class MemorySlots:
    """Of one gateway; gone with it, as are its turns."""

    shared = False

    def __init__(self) -> None:
        self._held: defaultdict[Holder, set[str]] = defaultdict(set)

    async def take(self, wanted: Sequence[tuple[Holder, int]], id: str) -> tuple[Holder, int] | None:
        for holder, most in wanted:
            if (taken := len(self._held.get(holder, ()))) >= most:
                return holder, taken
        for holder, _ in wanted:
            self._held[holder].add(id)
        return None

    async def hold(self, held: Sequence[tuple[Holder, str]]) -> None:
        for holder, id in held:
            self._held[holder].add(id)

    async def free(self, holders: Sequence[Holder], id: str) -> None:
        for holder in holders:
            self._held[holder].discard(id)
            if not self._held[holder]:
                del self._held[holder]


class DatabaseSlots:
    """Rows of the store."""

    shared = True

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s

    async def take(self, wanted: Sequence[tuple[Holder, int]], id: str) -> tuple[Holder, int] | None:
        return await self._store.take_slots(wanted, id, self._lease_s)

    async def hold(self, held: Sequence[tuple[Holder, str]]) -> None:
        await self._store.hold_slots(held, self._lease_s)

    async def free(self, holders: Sequence[Holder], id: str) -> None:
        await self._store.free_slots(id)
