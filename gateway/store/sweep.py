"""What time brings: dead leases and compactions ended, expired sessions erased, old events, keys, audit lines let go.

A sweep is in no turn's way. One transaction takes a bounded part, and passes over rows that another one holds: whoever
holds them is at work there, and the next sweep comes by. So it waits for nobody, and nobody waits long for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, select

from gateway.store.compactions import interrupt
from gateway.store.erase import erase_expired_session
from gateway.store.prepared import run_many
from gateway.store.reads import alive
from gateway.store.records import Receipt, RunningTurn
from gateway.store.statements import LAPSE_TURN, REKEY_TURN
from gateway.store.tables import RUNNING, audit, compactions, events, sessions, tenants, turns

PART = 500  # rows in one transaction of a sweep
ERASED = 10  # sessions in one; each may have many rows

_FREE_SESSION = (
    sessions.update()
    .where(sessions.c.tenant_id == bindparam("b_tenant"), sessions.c.id == bindparam("b_id"))
    .values(lease_owner=None, lease_until=None, running_turn_id=None, cancel_requested=0)
    .values(updated_at=bindparam("updated_at"))
)
_DELETE_EVENT = events.delete().where(
    events.c.tenant_id == bindparam("b_tenant"),
    events.c.turn_id == bindparam("b_turn"),
    events.c.seq == bindparam("b_seq"),
)
_DELETE_LINE = audit.delete().where(audit.c.tenant_id == bindparam("b_tenant"), audit.c.id == bindparam("b_id"))


def void_leases(connection: Connection, gateway_name: str, current_epoch: str, now: float) -> list[RunningTurn]:
    """End what earlier lives of this gateway held, up to PART. No sweep: it waits, for they must not outlive it."""
    mine = sessions.c.lease_owner.startswith(f"{gateway_name}/", autoescape=True)
    return _lapse(connection, mine & (sessions.c.lease_owner != f"{gateway_name}/{current_epoch}"), now, wait=True)


def lapse_leases(connection: Connection, now: float) -> list[RunningTurn]:
    """End what nobody renewed in time, up to PART."""
    return _lapse(connection, sessions.c.lease_until <= now, now, wait=False)


def _lapse(connection: Connection, which: ColumnElement[bool], now: float, *, wait: bool) -> list[RunningTurn]:
    """The turns are incomplete, the sessions free."""
    order = (sessions.c.tenant_id, sessions.c.id) if wait else (sessions.c.lease_until,)  # of locks | of the index
    rows = connection.execute(
        select(sessions.c.tenant_id, sessions.c.id, sessions.c.running_turn_id)
        .where(sessions.c.running_turn_id.is_not(None), which)
        .order_by(*order)
        .limit(PART)
        .with_for_update(skip_locked=not wait)
    )
    lapsed = [RunningTurn(*row) for row in rows]
    if lapsed:
        ended = {"status": "incomplete", "completed_at": now}
        run_many(connection, LAPSE_TURN, [{"b_tenant": t.tenant_id, "b_id": t.turn_id, **ended} for t in lapsed])
        freed = [{"b_tenant": t.tenant_id, "b_id": t.session_id, "updated_at": now} for t in lapsed]
        run_many(connection, _FREE_SESSION, freed)
    return lapsed


def erase_expired(connection: Connection, limit: int, now: float) -> list[tuple[str, Receipt]]:
    """(tenant, receipt) of up to `limit` sessions whose time was over."""
    rows = connection.execute(
        select(sessions.c.tenant_id, sessions.c.id)
        .where(sessions.c.expires_at <= now, ~alive(now))
        .order_by(sessions.c.expires_at)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    receipts = [(row.tenant_id, erase_expired_session(connection, row.tenant_id, row.id, now)) for row in rows]
    return [(tenant_id, receipt) for tenant_id, receipt in receipts if receipt is not None]


def erase_idle(
    connection: Connection, ttl_s: float, tenants_of_their_own: Mapping[str, float], limit: int, now: float
) -> list[tuple[str, Receipt]]:
    """The same, of up to `limit` sessions that nobody used for `ttl_s`, or what is said for their tenant. Not of those
    that are archived, or have a time of their own."""
    rows: list[Any] = []
    for tenant_id in connection.execute(select(tenants.c.id)).scalars().all():
        idle_s = tenants_of_their_own.get(tenant_id, ttl_s)
        if len(rows) == limit or math.isinf(idle_s):
            continue
        rows += connection.execute(
            select(sessions.c.tenant_id, sessions.c.id)
            .where(sessions.c.tenant_id == tenant_id, sessions.c.updated_at <= now - idle_s)
            .where(sessions.c.expires_at.is_(None), sessions.c.archived_at.is_(None))
            .where(sessions.c.running_turn_id.is_(None))
            .order_by(sessions.c.updated_at)
            .limit(limit - len(rows))
            .with_for_update(skip_locked=True)
        ).all()
    receipts = [(row.tenant_id, erase_expired_session(connection, row.tenant_id, row.id, now)) for row in rows]
    return [(tenant_id, receipt) for tenant_id, receipt in receipts if receipt is not None]


def purge_events(connection: Connection, before: float) -> int:
    """Delete up to PART events stored before `before`; how many."""
    old = select(events.c.tenant_id, events.c.turn_id, events.c.seq).where(events.c.created_at < before)
    rows = _oldest(connection, old.order_by(events.c.created_at))
    if rows:
        names = ("b_tenant", "b_turn", "b_seq")
        run_many(connection, _DELETE_EVENT, [dict(zip(names, row, strict=True)) for row in rows])
    return len(rows)


def purge_audit(connection: Connection, before: float) -> int:
    """Delete up to PART lines of the audit log written before `before`; how many."""
    rows = _oldest(connection, select(audit.c.tenant_id, audit.c.id).where(audit.c.at < before).order_by(audit.c.at))
    if rows:
        run_many(connection, _DELETE_LINE, [{"b_tenant": row.tenant_id, "b_id": row.id} for row in rows])
    return len(rows)


def forget_keys(connection: Connection, before: float) -> int:
    """Let up to PART idempotency keys of turns begun before `before` be used anew; how many."""
    keyed = (turns.c.idempotency_key.is_not(None), turns.c.status != "in_progress")
    old = select(turns.c.tenant_id, turns.c.id).where(turns.c.created_at < before, *keyed)
    rows = _oldest(connection, old.order_by(turns.c.created_at))
    if rows:
        run_many(connection, REKEY_TURN, [{"b_tenant": row.tenant_id, "b_id": row.id} for row in rows])
    return len(rows)


def void_compactions(connection: Connection, gateway_name: str, current_epoch: str, now: float) -> int:
    """Fail what earlier lives of this gateway ran, up to PART; how many. It waits, as `void_leases` does."""
    mine = compactions.c.owner.startswith(f"{gateway_name}/", autoescape=True)
    return _interrupt(connection, mine & (compactions.c.owner != f"{gateway_name}/{current_epoch}"), now, wait=True)


def lapse_compactions(connection: Connection, now: float) -> int:
    """Fail what is past its deadline, up to PART; how many."""
    return _interrupt(connection, compactions.c.deadline_at <= now, now, wait=False)


def _interrupt(connection: Connection, which: ColumnElement[bool], now: float, *, wait: bool) -> int:
    rows = connection.execute(
        select(compactions.c.tenant_id, compactions.c.id)
        .where(RUNNING, which)
        .order_by(compactions.c.tenant_id, compactions.c.session_id)  # the order of the index: no look at what is over
        .limit(PART)
        .with_for_update(skip_locked=not wait)
    ).all()
    for row in rows:
        connection.execute(interrupt(now).where(compactions.c.tenant_id == row.tenant_id, compactions.c.id == row.id))
    return len(rows)


def _oldest(connection: Connection, old: Any) -> list[Any]:
    return list(connection.execute(old.limit(PART).with_for_update(skip_locked=True)))
