"""The audit log in the database: functions of a connection, so that a line is written with what it tells of."""

from __future__ import annotations

from typing import Any, cast

import orjson
from sqlalchemy import ColumnElement, Connection, Row, select

from gateway.ids import id_maker
from gateway.store.audit_records import Action, AuditFilter, AuditLine, AuditPage, AuditRecord
from gateway.store.cursors import encode_cursor, past
from gateway.store.rows import encode, storable
from gateway.store.tables import audit


def write_line(connection: Connection, line: AuditLine, now: float) -> None:
    storable(line.object, line.tenant_id)
    row = {
        "tenant_id": line.tenant_id,
        "id": id_maker(lambda: now)("audit"),
        "at": now,
        "who": line.who,
        "action": line.action,
        "object": line.object,
        "request_id": line.request_id,
        "outcome": line.outcome,
        "details": encode(line.details),
    }
    connection.execute(audit.insert(), row)


def list_lines(connection: Connection, filter: AuditFilter, limit: int, cursor: str | None) -> AuditPage:
    """The newest first. Raises ValueError for a cursor that was not made here."""
    statement = select(audit).where(*_conditions(filter))
    if cursor is not None:
        statement = statement.where(past(cursor, audit.c.at, audit.c.id))
    rows = connection.execute(statement.order_by(audit.c.at.desc(), audit.c.id.desc()).limit(limit + 1)).all()
    page = tuple(_record(row) for row in rows[:limit])
    return AuditPage(page, encode_cursor(page[-1].at, page[-1].id) if len(rows) > limit else None)


def _conditions(filter: AuditFilter) -> list[ColumnElement[bool]]:
    storable(filter.tenant_id, filter.action)
    bounds = (
        (filter.tenant_id, audit.c.tenant_id.__eq__),
        (filter.action, audit.c.action.__eq__),
        (filter.since, audit.c.at.__ge__),
        (filter.until, audit.c.at.__lt__),
    )
    return [compare(bound) for bound, compare in bounds if bound is not None]


def _record(row: Row[Any]) -> AuditRecord:
    line = AuditLine(
        action=cast(Action, row.action),
        object=row.object,
        tenant_id=row.tenant_id,
        who=row.who,
        request_id=row.request_id,
        outcome=row.outcome,
        details=orjson.loads(row.details),
    )
    return AuditRecord(id=row.id, at=row.at, line=line)
