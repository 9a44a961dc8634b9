"""The store of limits and of what is counted for them; a part of `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sqlalchemy import Connection

from gateway.store import limits
from gateway.store.access import Access
from gateway.store.audit_records import AuditLine
from gateway.store.limit_records import Holder, Limited, Limits


class LimitStore(Access):
    async def list_limits(self, tenant_id: str | None = None) -> tuple[Limited, ...]:
        return await self._read(lambda c: limits.read_limits(c, tenant_id))

    async def limits_stamp(self) -> tuple[int, int]:
        """It changes whenever a limit does."""
        return await self._read(limits.stamp)

    async def set_limits(self, holder: Holder, wanted: Limits, *, line: AuditLine | None = None) -> bool:
        """In place of what was set for this holder. With none set its limits are gone; False: there were none."""
        return await self._audited(lambda c: limits.set_limits(c, holder, wanted, self._clock()), line)

    async def stored_bytes(self, holder: Holder) -> int:
        """Of the sessions that the tenant has, or that this key of it made."""
        return await self._read(lambda c: limits.stored_bytes(c, holder))

    async def session_ids(self, holder: Holder, idle_since: float) -> dict[str, bool]:
        """Its sessions -> whether nobody has used it since then, and no turn of it runs."""
        return await self._read(lambda c: limits.session_ids(c, holder, idle_since))

    # ---- counted for all gateways on the database

    async def add_within(self, name: str, window: int, previous_weight: float, limit: int, amount: int) -> bool:
        work = partial(
            limits.add_within,
            name=name,
            window=window,
            previous_weight=previous_weight,
            limit=limit,
            amount=amount,
        )
        return await self._write(work)

    async def read_counter(self, name: str, window: int) -> tuple[int, int]:
        """(the window before, this one)"""
        return await self._read(lambda c: limits.read_counter(c, name, window))

    async def clear_counter(self, name: str) -> None:
        await self._write(lambda c: limits.clear_counter(c, name))

    async def take_slots(
        self, wanted: Sequence[tuple[Holder, int]], id: str, lease_s: float
    ) -> tuple[Holder, int] | None:
        """A slot of each holder, or none at all: then which holder has how many already."""

        def work(connection: Connection) -> tuple[Holder, int] | None:
            now = self._clock()
            return limits.take_slots(connection, wanted, id, now + lease_s, now)

        return await self._write(work)

    async def hold_slots(self, held: Sequence[tuple[Holder, str]], lease_s: float) -> None:
        await self._write(lambda c: limits.hold_slots(c, held, self._clock() + lease_s))

    async def free_slots(self, id: str) -> None:
        await self._write(lambda c: limits.free_slots(c, id))

    async def sweep_counts(self, before_window: int) -> None:
        await self._write(lambda c: limits.sweep_counts(c, before_window, self._clock()))
