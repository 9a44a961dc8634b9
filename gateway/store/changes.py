"""Writes to sessions that are not turns: make, change, lease, cancel. Each is one transaction of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, and_, bindparam, update

from gateway.store.erase import erase_expired_session, forget_later
from gateway.store.erasure_records import ARCHIVED
from gateway.store.leases import in_force
from gateway.store.limits import check_sessions
from gateway.store.live import lock_sessions
from gateway.store.reads import read_session
from gateway.store.records import (
    DuplicateId,
    NewSession,
    SessionChanges,
    SessionRecord,
    SessionRuns,
    VersionConflict,
)
from gateway.store.rows import encode, metadata_rows, session_row, storable
from gateway.store.sizes import recount
from gateway.store.tables import forgettings, session_metadata, sessions, turns
from gateway.store.usage import move_user


def create_session(connection: Connection, new: NewSession, now: float) -> SessionRecord:
    """Raises DuplicateId, TooManySessions."""
    if read_session(connection, new.tenant_id, new.id, now) is not None:
        raise DuplicateId(f"there is a session {new.id!r} already")
    erase_expired_session(connection, new.tenant_id, new.id, now)  # one whose time is over, not yet swept
    check_sessions(connection, new.bounds)
    connection.execute(sessions.insert(), session_row(new, now))
    if rows := metadata_rows(new.tenant_id, new.id, new.metadata):
        connection.execute(session_metadata.insert(), rows)
    record = read_session(connection, new.tenant_id, new.id, now)
    assert record is not None, "created alive: NewSession.expires_at lies in the future"
    return record


def archive_session(connection: Connection, tenant_id: str, session_id: str, now: float) -> SessionRecord | None:
    """It takes no turns from now on, and replicas are to forget what they hold of it. Said twice, it stays as it is.
    None: absent. Raises SessionRuns."""
    live = lock_sessions(connection, [(tenant_id, session_id)]).get((tenant_id, session_id))
    session = read_session(connection, tenant_id, session_id, now)
    if live is None or session is None or session.archived_at is not None:
        return session
    if live.running is not None and in_force(live.lease_until, now):
        raise SessionRuns(live.running)
    forget_later(connection, tenant_id, session_id, ARCHIVED, now, replicas_only=True)
    return update_session(connection, tenant_id, session_id, None, SessionChanges({"archived_at": now}), now)


def unarchive_session(connection: Connection, tenant_id: str, session_id: str, now: float) -> SessionRecord | None:
    """It takes turns again. None: absent."""
    lock_sessions(connection, [(tenant_id, session_id)])
    session = read_session(connection, tenant_id, session_id, now)
    if session is None or session.archived_at is None:
        return session
    waiting = (forgettings.c.tenant_id == tenant_id, forgettings.c.session_id == session_id)
    connection.execute(forgettings.delete().where(*waiting, forgettings.c.erasure_id == ARCHIVED))
    return update_session(connection, tenant_id, session_id, None, SessionChanges({"archived_at": None}), now)


def _text(value: object) -> object:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"expected text, not {type(value).__name__}")
    storable(value)
    return value


def _instant(value: object) -> object:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"expected seconds since 1970, not {type(value).__name__}")
    return value


CHANGEABLE: dict[str, Callable[[Any], object]] = {  # field of SessionRecord -> how it is stored
    "model": _text,
    "system": _text,
    "title": _text,
    "user_ref": _text,
    "tools": lambda tools: encode(list(tools)),
    "metadata": encode,
    "policy": encode,
    "expires_at": _instant,
    "archived_at": _instant,
}


def stored(changes: SessionChanges) -> dict[str, object]:
    """Column -> value. Raises ValueError for a field that cannot be changed, TypeError for a value of a wrong type."""
    if unknown := changes.set.keys() - CHANGEABLE.keys():
        raise ValueError(f"cannot be changed: {', '.join(sorted(unknown))}")
    return {name: CHANGEABLE[name](value) for name, value in changes.set.items()}


def update_session(
    connection: Connection, tenant_id: str, session_id: str, expected: int | None, changes: SessionChanges, now: float
) -> SessionRecord | None:
    """None: absent. Raises VersionConflict where `expected` is given and is not the version."""
    values = stored(changes)
    lock_sessions(connection, [(tenant_id, session_id)])
    current = read_session(connection, tenant_id, session_id, now)
    if current is None:
        return None
    if expected is not None and current.version != expected:
        raise VersionConflict(current.version)
    place = and_(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id)
    connection.execute(update(sessions).where(place).values(**values, version=current.version + 1, updated_at=now))
    if "metadata" in changes.set:
        connection.execute(
            session_metadata.delete().where(
                session_metadata.c.tenant_id == tenant_id, session_metadata.c.session_id == session_id
            )
        )
        if rows := metadata_rows(tenant_id, session_id, changes.set["metadata"]):
            connection.execute(session_metadata.insert(), rows)
    if {"system", "tools", "metadata"} & changes.set.keys():
        recount(connection, tenant_id, session_id)
    if "user_ref" in changes.set:
        mine = and_(turns.c.tenant_id == tenant_id, turns.c.session_id == session_id)
        connection.execute(update(turns).where(mine).values(user_ref=changes.set["user_ref"] or ""))
        move_user(connection, tenant_id, session_id, changes.set["user_ref"] or "")
    return read_session(connection, tenant_id, session_id, min(now, changes.set.get("expires_at") or now))


_RENEW = (
    update(sessions)
    .where(
        sessions.c.tenant_id == bindparam("b_tenant"),
        sessions.c.id == bindparam("b_id"),
        sessions.c.fence == bindparam("b_fence"),
        sessions.c.running_turn_id.is_not(None),
    )
    .values(lease_until=bindparam("b_until"))
)


def renew_leases(
    connection: Connection, owner: str, held: Sequence[tuple[str, str, int]], until: float
) -> list[tuple[str, str, int]]:
    """Those of `held` (tenant, session, fence) that `owner` no longer holds; the others are good until `until`."""
    live = lock_sessions(connection, ((tenant_id, session_id) for tenant_id, session_id, _ in held))
    lost: list[tuple[str, str, int]] = []
    kept: list[tuple[str, str, int]] = []
    for tenant_id, session_id, fence in held:
        session = live.get((tenant_id, session_id))
        ours = session is not None and session.fence == fence and session.owner == owner and session.running is not None
        (kept if ours else lost).append((tenant_id, session_id, fence))
    if kept:
        names = ("b_tenant", "b_id", "b_fence", "b_until")
        connection.execute(_RENEW, [dict(zip(names, (*lease, until), strict=True)) for lease in kept])
    return lost


def request_cancel(connection: Connection, tenant_id: str, session_id: str, turn_id: str) -> bool:
    """Whether the turn runs; its gateway is told when it next asks."""
    asked = connection.execute(
        update(sessions)
        .where(sessions.c.tenant_id == tenant_id, sessions.c.id == session_id, sessions.c.running_turn_id == turn_id)
        .values(cancel_requested=1)
    )
    return asked.rowcount > 0
