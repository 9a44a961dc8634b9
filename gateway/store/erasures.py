"""Receipts of erasures, and erasures by end user: functions of a connection.

begin_user -> erase_of_user, a few sessions at a time, until none is left -> pending -> done when all places forgot
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import orjson
from sqlalchemy import Connection, Row, and_, exists, func, select, update

from gateway.store.cursors import encode_cursor, past
from gateway.store.erase import delete_session, forget_later, new_id
from gateway.store.erasure_records import ErasureScope, ErasureStatus, Receipt, ReceiptPage
from gateway.store.leases import in_force_sql
from gateway.store.records import RunningTurn
from gateway.store.rows import encode, storable
from gateway.store.tables import OPEN, erasures, forgettings, sessions
from gateway.store.usage import forget_user


def begin_user(connection: Connection, tenant_id: str, user_ref: str, subject: str, now: float) -> str:
    """The id of its receipt: of one that is not done yet, where there is one. Raises UnstorableText."""
    storable(user_ref)
    mine = and_(erasures.c.tenant_id == tenant_id, erasures.c.subject == subject, OPEN)
    known = connection.execute(select(erasures.c.id).where(mine).limit(1).with_for_update()).scalar()
    if known is not None:
        here = and_(erasures.c.tenant_id == tenant_id, erasures.c.id == known)
        connection.execute(update(erasures).where(here).values(status="erasing", user_ref=user_ref))
        return str(known)
    row = {
        "tenant_id": tenant_id,
        "id": new_id(),
        "session_id": "",
        "erased": "{}",
        "at": now,
        "scope": "user",
        "subject": subject,
        "user_ref": user_ref,
        "sessions": 0,
        "status": "erasing",
    }
    connection.execute(erasures.insert(), row)
    return str(row["id"])


def running_turns(
    connection: Connection, tenant_id: str, *, session_id: str | None, user_ref: str | None, now: float
) -> list[RunningTurn]:
    """That run now, of one session or of an end user's."""
    mine = sessions.c.id == session_id if session_id is not None else sessions.c.user_ref == user_ref
    rows = connection.execute(
        select(sessions.c.tenant_id, sessions.c.id, sessions.c.running_turn_id).where(
            sessions.c.tenant_id == tenant_id,
            mine,
            sessions.c.running_turn_id.is_not(None),
            in_force_sql(sessions.c.lease_until, now),
        )
    )
    return [RunningTurn(*row) for row in rows]


def erase_of_user(connection: Connection, tenant_id: str, erasure_id: str, limit: int, now: float) -> list[str] | None:
    """Erase up to `limit` sessions -> which; None: there are none left, and the receipt waits for places alone."""
    here = and_(erasures.c.tenant_id == tenant_id, erasures.c.id == erasure_id)
    row = connection.execute(select(erasures).where(here).with_for_update()).first()
    if row is None or row.status != "erasing" or row.user_ref is None:
        return None
    found = (
        connection.execute(
            select(sessions.c.id)
            .where(sessions.c.tenant_id == tenant_id, sessions.c.user_ref == row.user_ref)
            .order_by(sessions.c.id)
            .limit(limit)
        )
        .scalars()
        .all()
    )
    erased, gone = Counter[str](orjson.loads(row.erased)), []
    for session_id in found:
        counts = delete_session(connection, tenant_id, session_id)
        if counts is not None:
            erased.update(counts)
            forget_later(connection, tenant_id, session_id, erasure_id, now)
            gone.append(session_id)
    values: dict[str, Any] = {"erased": encode(dict(erased)), "sessions": row.sessions + len(gone)}
    if not found:
        forget_user(connection, tenant_id, row.user_ref)
        waits = _waits(connection, tenant_id, erasure_id)
        values |= {"user_ref": None, "status": "pending" if waits else "done", "completed_at": None if waits else now}
    connection.execute(update(erasures).where(here).values(**values))
    return gone if found else None


def unfinished(connection: Connection, before: float, limit: int) -> list[tuple[str, str]]:
    """(tenant, receipt) of end users' erasures begun before `before` whose rows may not all be gone."""
    wanted = (OPEN, erasures.c.status == "erasing", erasures.c.at < before)
    rows = connection.execute(select(erasures.c.tenant_id, erasures.c.id).where(*wanted).limit(limit))
    return [(row.tenant_id, row.id) for row in rows]


def user_of(connection: Connection, tenant_id: str, erasure_id: str) -> str | None:
    """Whose rows are still to be erased."""
    here = (erasures.c.tenant_id == tenant_id, erasures.c.id == erasure_id)
    return connection.execute(select(erasures.c.user_ref).where(*here)).scalar()


def read_receipt(connection: Connection, tenant_id: str, erasure_id: str) -> Receipt | None:
    here = (erasures.c.tenant_id == tenant_id, erasures.c.id == erasure_id)
    row = connection.execute(select(erasures).where(*here)).first()
    return None if row is None else _receipt(row, _open_places(connection, tenant_id, [erasure_id]).get(row.id, {}))


def list_receipts(
    connection: Connection, tenant_id: str, limit: int, cursor: str | None, subject: str | None, status: str | None
) -> ReceiptPage:
    """Newest first. Raises ValueError for a cursor that was not made here."""
    wanted = select(erasures).where(erasures.c.tenant_id == tenant_id)
    if cursor is not None:
        wanted = wanted.where(past(cursor, erasures.c.at, erasures.c.id))
    if subject is not None:
        wanted = wanted.where(erasures.c.subject == subject)
    if status is not None:
        wanted = wanted.where(erasures.c.status == status)
    rows = connection.execute(wanted.order_by(erasures.c.at.desc(), erasures.c.id.desc()).limit(limit + 1)).all()
    waiting = _open_places(connection, tenant_id, [row.id for row in rows[:limit]])
    page = tuple(_receipt(row, waiting.get(row.id, {})) for row in rows[:limit])
    return ReceiptPage(page, encode_cursor(page[-1].at, page[-1].id) if len(rows) > limit else None)


def note_done(
    connection: Connection, tenant_id: str, erasure_id: str, place: str, said: dict[str, Any], now: float
) -> None:
    """A place has forgotten one session; the receipt is done with the last of all places."""
    here = and_(erasures.c.tenant_id == tenant_id, erasures.c.id == erasure_id)
    row = connection.execute(select(erasures.c.places, erasures.c.status).where(here).with_for_update()).first()
    if row is None:
        return
    told: dict[str, dict[str, Any]] = orjson.loads(row.places)
    told[place] = _added(told.get(place, {}), said)
    values: dict[str, Any] = {"places": encode(told)}
    if row.status == "pending" and not _waits(connection, tenant_id, erasure_id):
        values |= {"status": "done", "completed_at": now}
    connection.execute(update(erasures).where(here).values(**values))


def _added(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Counts of both; the state, and what else is said, of the latter."""
    counts = Counter[str](before.get("gone", {}))
    counts.update(said.get("gone", {}))
    more = {"sessions": before.get("sessions", 0) + 1, **({"gone": dict(counts)} if counts else {})}
    return {**before, **said, **more}


def _waits(connection: Connection, tenant_id: str, erasure_id: str) -> bool:
    mine = and_(forgettings.c.tenant_id == tenant_id, forgettings.c.erasure_id == erasure_id)
    return bool(connection.execute(select(exists().where(mine))).scalar())


def _open_places(connection: Connection, tenant_id: str, ids: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Receipt -> place -> what it still waits for."""
    rows = connection.execute(
        select(
            forgettings.c.erasure_id,
            forgettings.c.place,
            func.count().label("sessions"),
            func.max(forgettings.c.tries).label("tries"),
            func.max(forgettings.c.error).label("error"),
        )
        .where(forgettings.c.tenant_id == tenant_id, forgettings.c.erasure_id.in_(ids))
        .group_by(forgettings.c.erasure_id, forgettings.c.place)
    )
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        left = {"state": "pending", "left": row.sessions, "tries": row.tries, "error": row.error}
        found.setdefault(row.erasure_id, {})[row.place] = left
    return found


def _receipt(row: Row[Any], waiting: dict[str, dict[str, Any]]) -> Receipt:
    told = orjson.loads(row.places)
    places = {name: {**told.get(name, {}), **waiting.get(name, {})} for name in sorted({*told, *waiting})}
    return Receipt(
        id=row.id,
        scope=cast(ErasureScope, row.scope),
        session_id=row.session_id or None,
        subject=row.subject,
        sessions=row.sessions,
        status=cast(ErasureStatus, row.status),
        erased=orjson.loads(row.erased),
        places=places,
        at=row.at,
        completed_at=row.completed_at,
    )
