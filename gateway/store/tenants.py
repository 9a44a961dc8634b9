"""Tenants: functions of a connection."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, func, or_, select
from sqlalchemy.sql import Select

from gateway.store.audit import write_line
from gateway.store.audit_records import AuditLine
from gateway.store.cursors import encode_cursor, past
from gateway.store.key_records import TenantPage, TenantRecord
from gateway.store.rows import storable
from gateway.store.tables import api_keys, tenants


def add_tenant(connection: Connection, tenant_id: str, name: str, now: float, line: AuditLine | None) -> bool:
    """False: it is there already, and stays as it is."""
    storable(tenant_id, name)
    if connection.execute(select(tenants.c.id).where(tenants.c.id == tenant_id)).first() is not None:
        return False
    connection.execute(tenants.insert(), {"id": tenant_id, "name": name, "created_at": now})
    if line is not None:
        write_line(connection, line, now)
    return True


def get_tenant(connection: Connection, tenant_id: str, now: float) -> TenantRecord | None:
    storable(tenant_id)
    row = connection.execute(_counted(now).where(tenants.c.id == tenant_id)).first()
    return None if row is None else _tenant_of(row)


def list_tenants(connection: Connection, limit: int, cursor: str | None, now: float) -> TenantPage:
    """The newest first. Raises ValueError for a cursor that was not made here."""
    statement = _counted(now)
    if cursor is not None:
        statement = statement.where(past(cursor, tenants.c.created_at, tenants.c.id))
    ordered = statement.order_by(tenants.c.created_at.desc(), tenants.c.id.desc())
    rows = connection.execute(ordered.limit(limit + 1)).all()
    page = tuple(_tenant_of(row) for row in rows[:limit])
    return TenantPage(page, encode_cursor(page[-1].created_at, page[-1].id) if len(rows) > limit else None)


def _counted(now: float) -> Select[tuple[str, str, float, int]]:
    working = (
        select(func.count())
        .select_from(api_keys)
        .where(
            api_keys.c.tenant_id == tenants.c.id,
            api_keys.c.revoked_at.is_(None),
            or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now),
        )
        .scalar_subquery()
        .label("working")
    )
    return select(tenants.c.id, tenants.c.name, tenants.c.created_at, working)


def _tenant_of(row: Row[Any]) -> TenantRecord:
    return TenantRecord(id=row.id, name=row.name, created_at=row.created_at, keys=row.working)
