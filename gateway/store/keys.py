"""API keys and tenants: functions of a connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from sqlalchemy import Connection, Row, bindparam, func, select, update

from gateway.store.records import DuplicateId, KeyRecord, Overview
from gateway.store.rows import encode, storable
from gateway.store.tables import api_keys, sessions, tenants, turns

_FIND = select(api_keys).where(api_keys.c.digest == bindparam("b_digest"))
_TOUCH = (
    update(api_keys)
    .where(api_keys.c.tenant_id == bindparam("b_tenant"), api_keys.c.id == bindparam("b_id"))
    .values(last_used_at=bindparam("b_at"))
)


def add_key(connection: Connection, key: KeyRecord, now: float) -> None:
    """Makes the tenant too, where it is new. Raises DuplicateId."""
    storable(key.id, key.tenant_id, key.name)
    taken = (api_keys.c.digest == key.digest) | ((api_keys.c.tenant_id == key.tenant_id) & (api_keys.c.id == key.id))
    if connection.execute(select(api_keys.c.id).where(taken)).first() is not None:
        raise DuplicateId(f"there is a key {key.id!r} already")
    add_tenant(connection, key.tenant_id, key.tenant_id, now)
    connection.execute(
        api_keys.insert(),
        {
            "tenant_id": key.tenant_id,
            "id": key.id,
            "name": key.name,
            "digest": key.digest,
            "scopes": encode(sorted(key.scopes)),
            "created_at": key.created_at,
            "expires_at": key.expires_at,
            "revoked_at": key.revoked_at,
            "last_used_at": key.last_used_at,
        },
    )


def find_key(connection: Connection, digest: bytes) -> KeyRecord | None:
    """By digest, in any state: whether it is revoked or over is the caller's to judge."""
    row = connection.execute(_FIND, {"b_digest": digest}).first()
    return None if row is None else _key_of(row)


def list_keys(connection: Connection, tenant_id: str | None) -> tuple[KeyRecord, ...]:
    statement = select(api_keys).order_by(api_keys.c.tenant_id, api_keys.c.created_at, api_keys.c.id)
    if tenant_id is not None:
        statement = statement.where(api_keys.c.tenant_id == tenant_id)
    return tuple(_key_of(row) for row in connection.execute(statement))


def revoke_key(connection: Connection, tenant_id: str, key_id: str, now: float) -> bool:
    """Whether there is such a key; a second time changes nothing."""
    place = (api_keys.c.tenant_id == tenant_id, api_keys.c.id == key_id)
    connection.execute(update(api_keys).where(*place, api_keys.c.revoked_at.is_(None)).values(revoked_at=now))
    return connection.execute(select(api_keys.c.id).where(*place)).first() is not None


def touch_keys(connection: Connection, used: Mapping[tuple[str, str], float]) -> None:
    """`used`: (tenant, key) -> when."""
    rows = [{"b_tenant": tenant, "b_id": key, "b_at": at} for (tenant, key), at in sorted(used.items())]
    connection.execute(_TOUCH, rows)


def add_tenant(connection: Connection, tenant_id: str, name: str, now: float) -> bool:
    """False: it is there already, and stays as it is."""
    storable(tenant_id, name)
    if connection.execute(select(tenants.c.id).where(tenants.c.id == tenant_id)).first() is not None:
        return False
    connection.execute(tenants.insert(), {"id": tenant_id, "name": name, "created_at": now})
    return True


def list_tenants(connection: Connection) -> tuple[tuple[str, str], ...]:
    """(id, name)"""
    return tuple((row.id, row.name) for row in connection.execute(select(tenants).order_by(tenants.c.id)))


def overview(connection: Connection, now: float) -> Overview:
    def count(table: Any, *which: Any) -> int:
        return int(connection.execute(select(func.count()).select_from(table).where(*which)).scalar_one())

    by_status = connection.execute(select(turns.c.status, func.count()).group_by(turns.c.status))
    return Overview(
        tenants=count(tenants),
        sessions=count(sessions),
        running=count(sessions, sessions.c.running_turn_id.is_not(None), sessions.c.lease_until > now),
        turns={row[0]: row[1] for row in by_status},
        keys=count(api_keys, api_keys.c.revoked_at.is_(None)),
    )


def _key_of(row: Row[Any]) -> KeyRecord:
    return KeyRecord(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        digest=row.digest,
        scopes=frozenset(orjson.loads(row.scopes)),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )
