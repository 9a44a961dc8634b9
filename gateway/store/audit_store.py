"""The store of the audit log; a part of `Store`."""

from __future__ import annotations

from gateway.store import audit, sweep
from gateway.store.access import Access
from gateway.store.audit_records import AuditFilter, AuditLine, AuditPage

EVERY_LINE = AuditFilter()


class AuditStore(Access):
    async def note(self, line: AuditLine) -> None:
        """Write a line by itself, for what is done or refused outside the database; what is done in it has its line in
        the same transaction."""
        await self._write(lambda c: audit.write_line(c, line, self._clock()))

    async def list_audit(
        self, *, limit: int = 20, cursor: str | None = None, filter: AuditFilter = EVERY_LINE
    ) -> AuditPage:
        """The newest first, of all tenants unless the filter names one. Raises ValueError for a cursor that was not
        made here."""
        return await self._read(lambda c: audit.list_lines(c, filter, limit, cursor))

    async def purge_audit(self, before: float) -> int:
        """Delete lines written before `before`, seconds since 1970; how many."""
        return await self._count(lambda c: sweep.purge_audit(c, before))
