"""Pages of sessions, newest first, under an opaque cursor that names the last one seen."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Select, and_, false, func, or_, select, true

from gateway.store.cursors import encode_cursor, past
from gateway.store.leases import in_force_sql
from gateway.store.reads import alive
from gateway.store.records import SessionFilter, SessionPage
from gateway.store.rows import session_of, storable
from gateway.store.tables import session_metadata, sessions


def list_sessions(
    connection: Connection, tenant_id: str, filter: SessionFilter, limit: int, cursor: str | None, now: float
) -> SessionPage:
    statement = select(sessions).where(sessions.c.tenant_id == tenant_id, alive(now), *_conditions(filter, now))
    if cursor is not None:
        statement = statement.where(past(cursor, sessions.c.updated_at, sessions.c.id))
    rows = connection.execute(_newest_first(statement).limit(limit + 1)).all()
    page = tuple(session_of(row, now) for row in rows[:limit])
    return SessionPage(page, encode_cursor(page[-1].updated_at, page[-1].id) if len(rows) > limit else None)


def _newest_first(statement: Select[tuple[object, ...]]) -> Select[tuple[object, ...]]:
    return statement.order_by(sessions.c.updated_at.desc(), sessions.c.id.desc())


def _conditions(filter: SessionFilter, now: float) -> list[ColumnElement[bool]]:
    storable(filter.user_ref, filter.query, *filter.metadata.keys(), *filter.metadata.values())
    bounds = (
        (filter.created_after, sessions.c.created_at.__gt__),
        (filter.created_before, sessions.c.created_at.__lt__),
        (filter.updated_after, sessions.c.updated_at.__gt__),
        (filter.updated_before, sessions.c.updated_at.__lt__),
    )
    conditions: list[ColumnElement[bool]] = [compare(bound) for bound, compare in bounds if bound is not None]
    if not filter.include_archived:
        conditions.append(sessions.c.archived_at.is_(None))
    if filter.user_ref is not None:
        conditions.append(sessions.c.user_ref == filter.user_ref)
    if filter.status is not None:
        conditions.append(_status(filter.status, now))
    if filter.query is not None:
        text = filter.query.lower()
        conditions.append(
            or_(
                func.lower(sessions.c.title).contains(text, autoescape=True),
                func.lower(sessions.c.id).contains(text, autoescape=True),
            )
        )
    conditions += [_labelled(key, value) for key, value in filter.metadata.items()]
    return conditions


def _status(status: str, now: float) -> ColumnElement[bool]:
    running = and_(sessions.c.running_turn_id.is_not(None), in_force_sql(sessions.c.lease_until, now))
    match status:
        case "running":
            return running
        case "idle":
            return or_(sessions.c.running_turn_id.is_(None), ~in_force_sql(sessions.c.lease_until, now))
        case "archived":
            return sessions.c.archived_at.is_not(None)
        case _:
            return false()


def _labelled(key: str, value: str) -> ColumnElement[bool]:
    return (
        select(true())
        .where(
            session_metadata.c.tenant_id == sessions.c.tenant_id,
            session_metadata.c.session_id == sessions.c.id,
            session_metadata.c.key == key,
            session_metadata.c.value == value,
        )
        .exists()
    )
