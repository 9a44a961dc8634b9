"""Empties replicas that are drained: every gateway says what it still runs there, one of them moves the sessions.

    every gateway   no more turns there (Roster); running ones end; "so many are left" each half second
    the worker      takes the drain by a lease, moves what is worth it, writes the progress, ends it

A worker that dies is replaced when its lease is over; what it moved is moved.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog

from engines.contract import EngineError
from gateway.background import repeated
from gateway.errors import GatewayError
from gateway.fleet import drain
from gateway.fleet.drain import Progress
from gateway.fleet.placement import Placement
from gateway.fleet.roster import Roster
from gateway.sessions.compaction_room import CompactionRoom
from gateway.sessions.history import History
from gateway.sessions.moving import NowhereToGo, PolicyOf, move
from gateway.sessions.snapshot import replica_for
from gateway.store.records import StoreUnavailable
from gateway.store.replica_records import PinnedSession, ReplicaRecord
from gateway.traces import trace_of

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 0.5
LEASE_S = 5.0
RENEW_S = 1.0  # the lease, and the progress that is shown
AT_ONCE = 4  # sessions of one drain that are moved at the same time


class Drains:
    """`owner` names this gateway's life."""

    def __init__(self, room: CompactionRoom, roster: Roster, *, owner: str, policy: PolicyOf, pin_ttl_s: float) -> None:
        self.room, self.roster, self.owner = room, roster, owner
        self.policy, self.pin_ttl_s = policy, pin_ttl_s
        self._working: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with repeated(self._look, every_s=LOOK_EVERY_S, name="drains"):
                yield
        finally:
            for task in self._working.values():
                task.cancel()
            await asyncio.gather(*self._working.values(), return_exceptions=True)

    async def _look(self) -> None:
        for record in list(self.roster.records.values()):
            if record.state != "draining":
                continue
            replica = self.room.fleet.get(record.name)
            left = 0 if replica is None else replica.in_flight + replica.queued
            await self.room.store.report_running(record.name, self.owner, left)
            if record.name not in self._working:
                task = asyncio.create_task(_Drain(self, record).to_end(), name=f"drain-{record.name}")
                self._working[record.name] = task
                task.add_done_callback(partial(self._ended, record.name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._working.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, StoreUnavailable):
                log.warning("a drain waits for the database", replica=name, reason=str(error))
            else:
                log.error("a drain failed inside the gateway", replica=name, trace=trace_of(error))


class _Drain:
    """One drain, as its worker does it."""

    def __init__(self, drains: Drains, record: ReplicaRecord) -> None:
        self._room, self._roster = drains.room, drains.roster
        self._owner, self._policy, self._pin_ttl_s = drains.owner, drains.policy, drains.pin_ttl_s
        self._record = record
        self._progress = Progress.of_json(record.progress)
        self._todo: list[PinnedSession] = []
        self._seen: set[tuple[str, str, str]] = set()  # sessions at a turn that are not to be looked at again
        self._sent: Counter[str] = Counter()  # replica -> sessions that went there, or are on their way
        self._lost = False
        self._looked_at: float | None = None  # of all pinned sessions, seconds since 1970

    async def to_end(self) -> None:
        """Returns where another gateway works on it, it is not drained any more, or nothing is left to do."""
        await self._renew()
        async with repeated(self._renew, every_s=RENEW_S, name=f"drain-lease-{self._record.name}"):
            while not self._lost:
                late = self._seconds_left() <= 0.0
                # running turns first: those that end leave their sessions pinned here
                self._progress.running = await self._room.store.running_at(self._record.name)
                if not self._todo:
                    await self._count()
                if self._todo and not late:
                    await self._move_some()
                elif self._over():
                    await self._end(late=late)
                    return
                else:
                    await asyncio.sleep(LOOK_EVERY_S)

    async def _renew(self) -> None:
        record, told = self._record, self._progress.as_json()
        self._lost = not await self._room.store.work_on_drain(
            record.name, record.revision, self._owner, told, lease_s=LEASE_S
        )

    def _over(self) -> bool:
        record, now = self._record, self._room.fleet.wall()
        return drain.over(self._progress, began_at=record.changed_at, until=record.drain_until, now=now)

    async def _end(self, *, late: bool) -> None:
        record, progress = self._record, self._progress
        progress.timed_out = late and bool(progress.running or progress.sessions_left)
        progress.released += progress.sessions_left
        progress.sessions_left = 0
        if await self._room.store.end_drain(record.name, record.revision, self._owner, progress.as_json()):
            await self._roster.refresh()

    async def _count(self) -> None:
        """What is left to move; what is not worth it is let go."""
        progress, now = self._progress, self._room.fleet.wall()
        within_s = self._pin_ttl_s if self._looked_at is None else now - self._looked_at + drain.CLOCKS_S
        found = await self._room.store.pinned_sessions(self._record.name, within_s)
        pinned = [session for session in found if _key(session) not in self._seen]
        self._looked_at = self._looked_at or now  # from then on only sessions whose turns ended since can be new
        self._todo = drain.worth_moving(pinned, now)
        self._seen.update(map(_key, pinned))
        progress.released += len(pinned) - len(self._todo)
        progress.sessions_left = len(self._todo)

    async def _move_some(self) -> None:
        some, self._todo = self._todo[:AT_ONCE], self._todo[AT_ONCE:]
        await asyncio.gather(*map(self._move, some))

    async def _move(self, session: PinnedSession) -> None:
        progress, old = self._progress, self._room.fleet.get(self._record.name)
        try:
            async with asyncio.timeout(self._seconds_left()):
                moved = await move(self._room, session, old, self._where_to, self._policy)
        except (EngineError, GatewayError, NowhereToGo, TimeoutError) as error:
            log.warning("a session was not moved", session_id=session.session_id, reason=str(error))
            progress.failed += 1
        else:
            progress.moved += moved  # else a turn came first, and was placed by itself
        progress.sessions_left = max(0, progress.sessions_left - 1)

    def _where_to(self, model: str, history: History) -> Placement | None:
        """As a turn would be placed, among those that did not take more than the others so far."""
        fleet = self._room.fleet
        can = [r.name for r in fleet if r.serves(model) and r.available(fleet.now())]
        placement = replica_for(model, history, fleet, among=drain.with_room(self._sent, can))
        if placement is not None:
            self._sent[placement.replica.name] += 1
        return placement

    def _seconds_left(self) -> float:
        until = self._record.drain_until
        return float("inf") if until is None else max(0.0, until - self._room.fleet.wall())


def _key(session: PinnedSession) -> tuple[str, str, str]:
    return session.tenant_id, session.session_id, session.turn_id
