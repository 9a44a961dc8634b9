"""The store of the usage ledger; a part of `Store`. What a turn of a session used is booked by `finish_turn` itself.

What belongs to no transaction of a turn (turns without a session, completions, the gateway's own work) is noted in
memory and written every second, once, however often the write has to be tried.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from gateway.store import usage, usage_reports
from gateway.store.access import Access
from gateway.store.database import Database
from gateway.store.rows import storable
from gateway.store.usage_records import Account, Amount, UsagePage, UsageQuery, day_of

MOST_NOTED = 10_000  # accounts in memory while the database is away; then end users are no longer told apart


@dataclass(slots=True)
class _Notes:
    """What waits to be written: `written` under `number`, perhaps already; `noted` after that."""

    number: int = 0
    written: Mapping[Account, Amount] = field(default_factory=dict)
    noted: dict[Account, Amount] = field(default_factory=dict)


class UsageStore(Access):
    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        super().__init__(database, clock)
        self._life = secrets.token_hex(12)
        self._notes = _Notes()
        self._flushing = asyncio.Lock()

    def note_usage(self, account: Account, amount: Amount) -> None:
        """To be written by the next flush. Raises UnstorableText. `account.user_ref` of a session is looked up then."""
        storable(account.tenant_id, account.key_id, account.user_ref, account.session_id, account.model)
        noted = self._notes.noted
        if account not in noted and len(noted) >= MOST_NOTED:
            account = replace(account, user_ref="")
        noted[account] = noted.get(account, Amount()) + amount

    @property
    def usage_waiting(self) -> int:
        """Accounts that were noted and are not known to be written."""
        return len(self._notes.written) + len(self._notes.noted)

    async def flush_usage(self) -> None:
        """Write what was noted. The gateway calls it every second, `close` at the end.

        Raises StoreUnavailable: what was noted stays, to be written by the next.
        """
        async with self._flushing:
            notes = self._notes
            if not notes.written and notes.noted:
                notes.written, notes.noted, notes.number = notes.noted, {}, notes.number + 1
            if notes.written:
                entries = list(notes.written.items())
                work = partial(usage.flush, by=self._life, number=notes.number, entries=entries, now=self._clock())
                await self._write(work, "flush_usage")
                notes.written = {}

    async def roll_up_usage(self, kept_s: float) -> int:
        """Let go of the sessions and end users of days that ended more than `kept_s` ago; how many rows."""
        now = self._clock()
        before = day_of(now - kept_s)
        await self._write(lambda c: usage.forget_flushes(c, now - 86_400.0))
        return await self._count(lambda c: usage.roll_up(c, before))

    async def usage(self, query: UsageQuery) -> UsagePage:
        """What was booked, by group. Raises ValueError for a group or a name that there is none of."""
        return await self._read(lambda c: usage_reports.report(c, query))

    async def month_tokens(self, tenant_id: str, key_id: str | None, since: int) -> int:
        """Prompt and output tokens of clients' work since that day, of the tenant or of one key."""
        return await self._read(lambda c: usage_reports.tokens_since(c, tenant_id, key_id, since))
