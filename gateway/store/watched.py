"""Whether the database takes what it is told, seen by whoever uses it: a Database around another. Knows no table.

A write that got through says that it is there; a read alone does not, for one that is full or locked can be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from gateway.store.database import Database, T, Work
from gateway.store.records import StoreUnavailable

log = structlog.get_logger(__name__)


class Watched:
    """`away`: the last that was heard of it is a StoreUnavailable."""

    def __init__(self, database: Database, now: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._now = now
        self._away_at: float | None = None

    @property
    def away(self) -> bool:
        return self._away_at is not None

    async def read(self, work: Work[T]) -> T:
        try:
            return await self._database.read(work)
        except StoreUnavailable as error:
            self._lost(error)
            raise

    async def write(self, work: Work[T], points: tuple[str, ...] = ()) -> T:
        try:
            done = await self._database.write(work, points)
        except StoreUnavailable as error:
            self._lost(error)
            raise
        self._found()
        return done

    async def scrub(self) -> bool:
        return await self._database.scrub()

    async def clean(self, tables: Sequence[str]) -> bool:
        return await self._database.clean(tables)

    async def close(self) -> None:
        await self._database.close()

    def _lost(self, error: StoreUnavailable) -> None:
        if self._away_at is None:
            self._away_at = self._now()
            log.warning("the database is away", reason=str(error)[:200])

    def _found(self) -> None:
        if self._away_at is not None:
            log.warning("the database is back", away_s=round(self._now() - self._away_at, 3))
            self._away_at = None
