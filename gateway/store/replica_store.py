"""The store of replicas and of where sessions were moved; a part of `Store`. Replicas belong to no tenant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sqlalchemy.exc import IntegrityError

from gateway.store import replicas
from gateway.store.access import Access
from gateway.store.audit_records import AuditLine
from gateway.store.replica_records import NewReplica, PinnedSession, ReplicaExists, ReplicaRecord, ReplicaState

REPORTS_S = 5.0  # a gateway that said nothing for so long is dead
MOST_PINNED = 10_000  # sessions of one look


class ReplicaStore(Access):
    async def list_replicas(self) -> tuple[ReplicaRecord, ...]:
        return await self._read(replicas.list_replicas)

    async def add_replica(self, new: NewReplica, *, limit: int, line: AuditLine | None = None) -> ReplicaRecord:
        """`limit`: of those added at runtime. Raises ReplicaExists, TooManyReplicas; the same once more is returned as
        it stands."""
        try:
            return await self._audited(lambda c: replicas.add_replica(c, new, self._clock(), limit=limit), line)
        except IntegrityError as error:  # another gateway added one between our look and our write
            raise ReplicaExists(f"the name {new.name!r} was taken just now") from error

    async def remove_replica(self, name: str, *, line: AuditLine | None = None) -> bool:
        """False: no replica of that name was added at runtime."""
        return await self._audited(lambda c: replicas.remove_replica(c, name), line)

    async def set_replica_state(
        self,
        name: str,
        state: ReplicaState,
        *,
        reason: str,
        timeout_s: float | None = None,
        added: bool = False,
        line: AuditLine | None = None,
    ) -> ReplicaRecord:
        """Said twice, a drain goes on as it was begun. `timeout_s` from now bounds a drain. `added`: at runtime.

        Raises NoReplica where one that was added is gone.
        """
        now = self._clock()
        until = None if timeout_s is None else now + timeout_s
        work = partial(
            replicas.set_replica_state, name=name, state=state, reason=reason, drain_until=until, now=now, added=added
        )
        try:
            return await self._audited(work, line)
        except IntegrityError:  # another gateway said something of it for the first time, just now
            return await self._audited(work, line)

    async def work_on_drain(
        self, name: str, revision: int, worker: str, progress: Mapping[str, Any], lease_s: float
    ) -> bool:
        """Be, or stay, the gateway that moves its sessions. False: another one is, or it is not drained any more."""
        now = self._clock()
        return await self._write(
            lambda c: replicas.work_on_drain(c, name, revision, worker, now + lease_s, progress, now)
        )

    async def end_drain(self, name: str, revision: int, worker: str, progress: Mapping[str, Any]) -> bool:
        """False: it is not this worker's any more."""
        return await self._write(lambda c: replicas.end_drain(c, name, revision, worker, progress, self._clock()))

    async def report_running(self, replica: str, gateway: str, running: int) -> None:
        """What this gateway still runs at a replica that is drained."""
        await self._write(lambda c: replicas.report_running(c, replica, gateway, running, self._clock()))

    async def running_at(self, replica: str) -> int:
        """Turns at a replica that is drained, of all gateways that live."""
        return await self._read(lambda c: replicas.running_at(c, replica, self._clock() - REPORTS_S))

    async def pinned_sessions(self, replica: str, within_s: float) -> tuple[PinnedSession, ...]:
        """Idle sessions used within that time whose next turn would go to this replica, the last used first."""
        since = self._clock() - within_s
        return await self._read(lambda c: replicas.pinned_sessions(c, replica, since, MOST_PINNED))

    async def rehome(self, tenant_id: str, session_id: str, turn_id: str, home: Mapping[str, Any]) -> bool:
        """The session's next turn goes on at `home` (replica, epoch). False: gone, or its head is another turn."""
        return await self._write(lambda c: replicas.rehome(c, tenant_id, session_id, turn_id, home))
