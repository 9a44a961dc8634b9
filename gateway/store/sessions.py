"""The store of sessions and turns. Every method takes the tenant; another tenant's object is absent.

Two durable writes a turn, `begin_turn` and `finish_turn`, group-committed with those of other turns. A write that
returned is on disk; one that raised StoreUnavailable was not acknowledged, and may be tried again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

from sqlalchemy import update

from gateway.failpoints import Failpoints
from gateway.store import changes, commands, keys, listing, reads, sweep
from gateway.store.audit_records import AuditLine
from gateway.store.audit_store import AuditStore
from gateway.store.compaction_store import CompactionStore
from gateway.store.database import connect, normalise
from gateway.store.erase import erase_session
from gateway.store.erasure_store import ErasureStore
from gateway.store.handovers import HandoverStore
from gateway.store.key_store import KeyStore
from gateway.store.limit_store import LimitStore
from gateway.store.records import (
    BeginOutcome,
    BeginTurn,
    FinishTurn,
    NewSession,
    Overview,
    Receipt,
    RunningTurn,
    SessionChanges,
    SessionFilter,
    SessionPage,
    SessionRecord,
    StoreUnavailable,
    TurnRecord,
)
from gateway.store.replica_store import ReplicaStore
from gateway.store.responses import delete_response
from gateway.store.schema import SchemaBehind, SchemaState, schema_state
from gateway.store.tables import probe, turns
from gateway.store.usage_store import UsageStore
from gateway.store.watched import Watched
from gateway.store.writer import Writer

EVERY = SessionFilter()
LEASE_S = 5.0  # after this long without renewal another gateway may take a session


@asynccontextmanager
async def open_store(
    url: str,
    *,
    clock: Callable[[], float] = time.time,
    synchronous: Literal["FULL", "NORMAL"] = "FULL",
    busy_timeout_s: float = 5.0,
    failpoints: Failpoints | None = None,
) -> AsyncIterator[Store]:
    """Open a database that is at this version's schema.

    Raises SchemaBehind or SchemaTooNew (see `gateway.store.schema`), StoreUnavailable, ValueError for the URL.
    """
    parsed = normalise(url)
    if parsed.get_backend_name() == "sqlite" and not await asyncio.to_thread(Path(parsed.database or "").exists):
        raise SchemaBehind(f"there is no database {parsed.database} yet. Run: turnkeep migrate")
    points = failpoints or Failpoints.from_environ(os.environ)
    database = Watched(connect(url, synchronous=synchronous, busy_timeout_s=busy_timeout_s, failpoints=points))
    try:
        (await schema_state(database)).demand()
        store = Store(database, clock)
        try:
            yield store
        finally:
            await store.close()
    finally:
        await database.close()


class Store(
    KeyStore,
    AuditStore,
    CompactionStore,
    HandoverStore,
    LimitStore,
    ReplicaStore,
    UsageStore,
    ErasureStore,
):
    """Made by `open_store`. `clock`: seconds since 1970; gateways on one database need clocks within a lease."""

    def __init__(self, database: Watched, clock: Callable[[], float]) -> None:
        super().__init__(database, clock)
        self._watched = database
        self._writer = Writer(database, clock)
        self._writer.start()
        self._unscrubbed = True  # an earlier life may have ended before it was done

    async def close(self) -> None:
        """Write what waits. Called by `open_store`."""
        await self._writer.close()
        await self.flush_keys()
        await self.flush_usage()
        if self._unscrubbed:
            await self._scrub()

    # ---- sessions

    async def create_session(self, new: NewSession) -> SessionRecord:
        """Raises DuplicateId, TooManySessions, UnstorableText."""
        return await self._write(lambda connection: changes.create_session(connection, new, self._clock()))

    async def get_session(self, tenant_id: str, session_id: str) -> SessionRecord | None:
        return await self._read(lambda c: reads.read_session(c, tenant_id, session_id, self._clock()))

    async def list_sessions(
        self, tenant_id: str, *, limit: int = 20, cursor: str | None = None, filter: SessionFilter = EVERY
    ) -> SessionPage:
        """Newest first. Raises ValueError for a cursor that was not made here."""
        return await self._read(lambda c: listing.list_sessions(c, tenant_id, filter, limit, cursor, self._clock()))

    async def update_session(
        self, tenant_id: str, session_id: str, expected_version: int | None, change: SessionChanges
    ) -> SessionRecord | None:
        """None: absent. Raises VersionConflict; ValueError or TypeError for what cannot be set."""
        return await self._write(
            lambda c: changes.update_session(c, tenant_id, session_id, expected_version, change, self._clock())
        )

    async def delete_session(self, tenant_id: str, session_id: str, *, line: AuditLine | None = None) -> Receipt | None:
        """Erase every row of it, also while a turn runs: that turn's finish is then refused. None: absent.

        `line`: what the audit log says of it; None for one that never was told of (an import that failed)."""
        receipt = await self._write(lambda c: erase_session(c, tenant_id, session_id, self._clock(), line))
        if receipt is not None:
            await self._scrub()
        return receipt

    async def archive_session(
        self, tenant_id: str, session_id: str, *, line: AuditLine | None = None
    ) -> SessionRecord | None:
        """None: absent. Raises SessionRuns."""
        work = partial(changes.archive_session, tenant_id=tenant_id, session_id=session_id, now=self._clock())
        return await self._audited(work, line)

    async def unarchive_session(
        self, tenant_id: str, session_id: str, *, line: AuditLine | None = None
    ) -> SessionRecord | None:
        """None: absent."""
        work = partial(changes.unarchive_session, tenant_id=tenant_id, session_id=session_id, now=self._clock())
        return await self._audited(work, line)

    async def erase_expired(self, limit: int = 100) -> list[tuple[str, Receipt]]:
        """Erase sessions whose time is over, at most `limit`; (tenant, receipt) of each."""
        return await self._erased(sweep.erase_expired, limit)

    async def erase_idle(
        self, ttl_s: float, tenants: Mapping[str, float], limit: int = 100
    ) -> list[tuple[str, Receipt]]:
        """The same of sessions that nobody used for `ttl_s`, or what `tenants` says of theirs; inf: for ever."""
        return await self._erased(partial(sweep.erase_idle, ttl_s=ttl_s, tenants_of_their_own=tenants), limit)

    async def _erased(self, sweeps: Callable[..., list[tuple[str, Receipt]]], limit: int) -> list[tuple[str, Receipt]]:
        receipts: list[tuple[str, Receipt]] = []
        while (left := min(sweep.ERASED, limit - len(receipts))) > 0:
            some = await self._write(partial(sweeps, limit=left, now=self._clock()))
            receipts += some
            if len(some) < left:
                break
        if receipts or self._unscrubbed:
            await self._scrub()
        return receipts

    async def delete_response(
        self, tenant_id: str, session_id: str, turn_id: str, *, line: AuditLine | None = None
    ) -> dict[str, int] | None:
        """Table -> rows erased. None: the turn runs. See `gateway.store.responses`."""
        work = partial(delete_response, tenant_id=tenant_id, session_id=session_id, turn_id=turn_id, now=self._clock())
        erased = await self._audited(work, line)
        if erased:
            await self._scrub()
        return erased

    # ---- turns

    async def begin_turn(self, begin: BeginTurn) -> BeginOutcome:
        """Transaction 1. Raises UnknownTurn (the parent), DuplicateId (the turn), TooManySessions, StoreUnavailable,
        UnstorableText."""
        outcome = await self._writer.submit(commands.begin(begin))
        assert outcome is not None
        assert not isinstance(outcome, Exception), "the writer raises what is an exception"
        return outcome

    async def finish_turn(self, finish: FinishTurn) -> None:
        """Transaction 2. Raises LeaseLost, StoreUnavailable. Said twice, a completed or failed turn stays as it is."""
        await self._writer.submit(commands.finish(finish))

    async def release_turn(self, tenant_id: str, session_id: str, turn_id: str, fence: int) -> None:
        """Undo `begin_turn` for a turn that was refused before it ran. Raises LeaseLost, StoreUnavailable.

        The turn leaves no trace, nor does a session that was made for it; a reopened one is `incomplete` again.
        """
        await self._writer.submit(commands.Release(tenant_id, session_id, turn_id, fence))

    async def get_turn(self, tenant_id: str, session_id: str, turn_id: str) -> TurnRecord | None:
        return await self._read(lambda c: reads.read_turn(c, tenant_id, session_id, which=turns.c.id == turn_id))

    async def get_turn_by_seq(self, tenant_id: str, session_id: str, seq: int) -> TurnRecord | None:
        return await self._read(lambda c: reads.read_turn(c, tenant_id, session_id, which=turns.c.seq == seq))

    async def find_turn(self, tenant_id: str, turn_id: str) -> TurnRecord | None:
        """The turn with that id, in whichever session of the tenant."""
        found = await self._read(lambda c: reads.read_turns(c, tenant_id, [turn_id]))
        return found[0] if found else None

    async def find_idempotent(self, tenant_id: str, session_id: str, key: str) -> TurnRecord | None:
        which = turns.c.idempotency_key == key
        return await self._read(lambda c: reads.read_turn(c, tenant_id, session_id, which=which))

    async def last_turn(self, tenant_id: str, session_id: str, turn_id: str | None = None) -> TurnRecord | None:
        """The session's head, or `turn_id`, without items and with empty ids: the same cost at any length."""
        return await self._read(lambda c: reads.read_head(c, tenant_id, session_id, turn_id))

    async def list_turns(
        self,
        tenant_id: str,
        session_id: str,
        *,
        after: int | None = None,
        before: int | None = None,
        order: Literal["asc", "desc"] = "asc",
        limit: int = 20,
        path_of: str | None = None,
    ) -> tuple[TurnRecord, ...]:
        """By seq, strictly between `after` and `before`; only of the path to `path_of` where that is given."""
        return await self._read(
            lambda c: reads.list_turns(
                c, tenant_id, session_id, after=after, before=before, order=order, limit=limit, path_of=path_of
            )
        )

    async def path(self, tenant_id: str, session_id: str, turn_id: str) -> tuple[TurnRecord, ...]:
        """The turns from the root to `turn_id`; empty where there is no such turn."""
        return await self._read(lambda c: reads.read_path(c, tenant_id, session_id, turn_id))

    async def path_ids(self, tenant_id: str, session_id: str, turn_id: str) -> bytes:
        """Token ids of the path, u32 little-endian, as many as its leaf's path_tokens."""
        return await self._read(lambda c: reads.read_path_ids(c, tenant_id, session_id, turn_id))

    async def find_meaning(self, tenant_id: str, user_ref: str | None, digests: Sequence[bytes]) -> TurnRecord | None:
        """Of one end user's turns the newest whose meaning is among `digests`; the latest digest that matches wins."""
        return await self._read(lambda c: reads.find_meaning(c, tenant_id, user_ref, digests, self._clock()))

    async def find_meaning_in(self, tenant_id: str, session_id: str, digests: Sequence[bytes]) -> TurnRecord | None:
        """The same within one session, whoever its end user is."""
        return await self._read(lambda c: reads.find_meaning_in(c, tenant_id, session_id, digests))

    # ---- leases

    async def renew_leases(
        self, owner: str, held: Sequence[tuple[str, str, int]], lease_s: float = LEASE_S
    ) -> list[tuple[str, str, int]]:
        """`held`: (tenant, session, fence). Returns those that are lost."""
        if not held:
            return []
        return await self._write(lambda c: changes.renew_leases(c, owner, held, self._clock() + lease_s))

    async def void_leases(self, gateway_name: str, current_epoch: str) -> list[RunningTurn]:
        """At a start: what earlier lives of this gateway ran becomes incomplete, and their sessions free.

        Their compactions are failed.
        """
        await self._count(lambda c: sweep.void_compactions(c, gateway_name, current_epoch, self._clock()))
        return await self._every(lambda c: sweep.void_leases(c, gateway_name, current_epoch, self._clock()))

    async def lapse_leases(self) -> list[RunningTurn]:
        """What nobody renewed in time becomes incomplete. A sweep; `begin_turn` does it for its own session anyway.

        Sweeps pass over what another transaction holds just now: they wait for no turn.
        """
        return await self._every(lambda c: sweep.lapse_leases(c, self._clock()))

    async def request_cancel(self, tenant_id: str, session_id: str, turn_id: str) -> bool:
        """Ask the gateway that runs this turn, whichever it is, to stop it. False: it does not run."""
        return await self._write(lambda c: changes.request_cancel(c, tenant_id, session_id, turn_id))

    async def cancelled_turns(self, owner: str) -> list[RunningTurn]:
        """Turns that `owner` runs and somebody asked to stop."""
        return await self._read(lambda c: reads.cancelled_turns(c, owner))

    # ---- events of a turn's stream

    async def append_events(
        self,
        tenant_id: str,
        session_id: str,
        turn_id: str,
        first_seq: int,
        events: Sequence[bytes],
        *,
        fence: int | None = None,
    ) -> None:
        """Group-committed. Raises LeaseLost where the turn is gone, or was reopened under another fence."""
        await self._writer.submit(commands.append(tenant_id, session_id, turn_id, first_seq, events, fence))

    async def read_events(
        self, tenant_id: str, session_id: str, turn_id: str, after_seq: int
    ) -> list[tuple[int, bytes]]:
        """(seq, event) with seq > after_seq, in order."""
        return await self._read(lambda c: reads.read_events(c, tenant_id, session_id, turn_id, after_seq))

    async def purge_events(self, before: float) -> int:
        """Delete events stored before `before`, seconds since 1970; how many."""
        return await self._count(lambda c: sweep.purge_events(c, before))

    async def forget_keys(self, before: float) -> int:
        """Let idempotency keys of turns begun before `before` be used anew; how many."""
        return await self._count(lambda c: sweep.forget_keys(c, before))

    # ---- for operators: across tenants

    async def recent_turns(self, limit: int = 20) -> tuple[TurnRecord, ...]:
        """The newest turns of all tenants, without items and with empty ids."""
        return await self._read(lambda c: reads.recent_turns(c, limit))

    async def overview(self) -> Overview:
        return await self._read(lambda c: keys.overview(c, self._clock()))

    async def ping(self) -> None:
        """A real write. Raises StoreUnavailable."""
        await self._write(lambda c: c.execute(update(probe).values(at=self._clock())))

    @property
    def away(self) -> bool:
        """Whether the database took nothing when it was last asked."""
        return self._watched.away

    async def look(self) -> None:
        """Where it is away, ask whether it is back."""
        if self.away:
            with suppress(StoreUnavailable):  # not yet; the log was told when it went
                await self.ping()

    async def schema(self) -> SchemaState:
        return await schema_state(self._database)
