"""How the parts of the store reach its database: a read, a write, a sweep part after part. Knows no table."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection

from gateway.store import sweep
from gateway.store.audit import write_line
from gateway.store.audit_records import AuditLine
from gateway.store.database import Database, T, Work
from gateway.store.records import RunningTurn
from gateway.store.writer import write


class Access:
    """`clock`: seconds since 1970; gateways on one database need clocks within a lease."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock

    async def _read(self, work: Work[T]) -> T:
        return await self._database.read(work)

    async def _write(self, work: Work[T], *points: str) -> T:
        """`points`: failpoints before_<point>_commit and after_<point>_commit."""
        return await write(self._database, work, points)

    async def _audited(self, work: Work[T], line: AuditLine | None) -> T:
        """A write, and its line in the audit log, in one transaction; no line where nothing was found (None, False)."""

        def both(connection: Connection) -> T:
            done = work(connection)
            if line is not None and done is not None and done is not False:
                write_line(connection, line, self._clock())
            return done

        return await self._write(both)

    async def _every(self, part: Work[list[RunningTurn]]) -> list[RunningTurn]:
        """Part after part, each in its own transaction, until one is not full."""
        found: list[RunningTurn] = []
        while len(some := await self._write(part)) == sweep.PART:
            found += some
        return found + some

    async def _count(self, part: Work[int]) -> int:
        """The same, of parts that count."""
        count = 0
        while (some := await self._write(part)) == sweep.PART:
            count += some
        return count + some
