"""API keys: functions of a connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, Row, bindparam, func, or_, select, update

from gateway.store.audit import write_line
from gateway.store.audit_records import AuditLine
from gateway.store.cursors import encode_cursor, past
from gateway.store.key_records import KeyOver, KeyPage, KeyRecord, LastAdminKey, NoTenant
from gateway.store.leases import in_force_sql
from gateway.store.limit_records import Holder
from gateway.store.limits import copy_limits
from gateway.store.records import DuplicateId, Overview
from gateway.store.rows import encode, storable
from gateway.store.tables import api_keys, sessions, tenants, turns
from gateway.store.tenants import add_tenant

_FIND = select(api_keys).where(api_keys.c.digest == bindparam("b_digest"))
_TOUCH = (
    update(api_keys)
    .where(api_keys.c.tenant_id == bindparam("b_tenant"), api_keys.c.id == bindparam("b_id"))
    .values(last_used_at=bindparam("b_at"))
)
_ADMIN = api_keys.c.scopes.contains('"admin"', autoescape=True)  # a list of words, as JSON


def add_key(connection: Connection, key: KeyRecord, now: float, *, new_tenant: bool, line: AuditLine | None) -> None:
    """`new_tenant`: a tenant that is not there is made too. Raises DuplicateId, NoTenant."""
    storable(key.id, key.tenant_id, key.name)
    taken = or_(api_keys.c.digest == key.digest, api_keys.c.id == key.id)
    if connection.execute(select(api_keys.c.id).where(taken)).first() is not None:
        raise DuplicateId(f"there is a key {key.id!r} already")
    if new_tenant:
        brought = None if line is None else replace(line, action="tenant.create", object=key.tenant_id, details={})
        add_tenant(connection, key.tenant_id, key.tenant_id, now, brought)
    elif connection.execute(select(tenants.c.id).where(tenants.c.id == key.tenant_id)).first() is None:
        raise NoTenant(f"there is no tenant {key.tenant_id!r}")
    row = {
        "tenant_id": key.tenant_id,
        "id": key.id,
        "name": key.name,
        "digest": key.digest,
        "scopes": encode(sorted(key.scopes)),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
        "replaces": key.replaces,
        "replaced_by": key.replaced_by,
    }
    connection.execute(api_keys.insert(), row)
    if line is not None:
        write_line(connection, line, now)


def find_key(connection: Connection, digest: bytes) -> KeyRecord | None:
    """By digest, in any state: whether it is revoked or over is the caller's to judge."""
    row = connection.execute(_FIND, {"b_digest": digest}).first()
    return None if row is None else _key_of(row)


def key_named(connection: Connection, key_id: str) -> KeyRecord | None:
    """By the first characters that people see, of whichever tenant."""
    storable(key_id)
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).first()
    return None if row is None else _key_of(row)


def list_keys(connection: Connection, tenant_id: str | None, limit: int, cursor: str | None) -> KeyPage:
    """The newest first. Raises ValueError for a cursor that was not made here."""
    storable(tenant_id)
    statement = select(api_keys)
    if tenant_id is not None:
        statement = statement.where(api_keys.c.tenant_id == tenant_id)
    if cursor is not None:
        statement = statement.where(past(cursor, api_keys.c.created_at, api_keys.c.id))
    ordered = statement.order_by(api_keys.c.created_at.desc(), api_keys.c.id.desc())
    rows = connection.execute(ordered.limit(limit + 1)).all()
    page = tuple(_key_of(row) for row in rows[:limit])
    return KeyPage(page, encode_cursor(page[-1].created_at, page[-1].id) if len(rows) > limit else None)


def revoke_key(
    connection: Connection, tenant_id: str, key_id: str, now: float, *, force: bool, line: AuditLine | None
) -> KeyRecord | None:
    """As it is then; a second time changes nothing. None: there is no such key. Raises LastAdminKey unless `force`."""
    key = _locked(connection, tenant_id, key_id)
    if key is None or key.revoked_at is not None:
        return key
    if not force and key.works(now) and _alone(connection, key, now):
        raise LastAdminKey(f"the key {key_id} is the last admin key that works")
    connection.execute(update(api_keys).where(*_place(key)).values(revoked_at=now))
    if line is not None:
        write_line(connection, line, now)
    return replace(key, revoked_at=now)


def rotate_key(
    connection: Connection, old: KeyRecord, new: KeyRecord, *, grace_s: float, force: bool, now: float, line: AuditLine
) -> tuple[KeyRecord, KeyRecord] | None:
    """Put `new` in the place of `old`, which works on for `grace_s`, but not past its own end -> both as they are then.

    None: there is no such key. Raises KeyOver; LastAdminKey, unless `force`, where it would end before anybody could
    have tried the new one.
    """
    known = _locked(connection, old.tenant_id, old.id)
    if known is None:
        return None
    if (state := known.state(now)) != "active":
        raise KeyOver(known, state)
    if grace_s == 0 and not force and _alone(connection, known, now):
        raise LastAdminKey(f"the key {old.id} is the last admin key that works")
    add_key(connection, new, now, new_tenant=False, line=None)
    end = now + grace_s if known.expires_at is None else min(now + grace_s, known.expires_at)
    connection.execute(update(api_keys).where(*_place(known)).values(expires_at=end, replaced_by=new.id))
    copy_limits(connection, Holder(known.tenant_id, known.id), Holder(new.tenant_id, new.id), now)
    write_line(connection, line, now)
    return replace(known, expires_at=end, replaced_by=new.id), new


def touch_keys(connection: Connection, used: Mapping[tuple[str, str], float]) -> None:
    """`used`: (tenant, key) -> when."""
    rows = [{"b_tenant": tenant, "b_id": key, "b_at": at} for (tenant, key), at in sorted(used.items())]
    connection.execute(_TOUCH, rows)


def overview(connection: Connection, now: float) -> Overview:
    def count(table: Any, *which: Any) -> int:
        return int(connection.execute(select(func.count()).select_from(table).where(*which)).scalar_one())

    by_status = connection.execute(select(turns.c.status, func.count()).group_by(turns.c.status))
    return Overview(
        tenants=count(tenants),
        sessions=count(sessions),
        running=count(sessions, sessions.c.running_turn_id.is_not(None), in_force_sql(sessions.c.lease_until, now)),
        turns={row[0]: row[1] for row in by_status},
        keys=count(api_keys, api_keys.c.revoked_at.is_(None)),
    )


def _place(key: KeyRecord) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return api_keys.c.tenant_id == key.tenant_id, api_keys.c.id == key.id


def _locked(connection: Connection, tenant_id: str, key_id: str) -> KeyRecord | None:
    """The key, with all admin keys locked, in order: of two that would end the last ones, the second sees the first."""
    storable(tenant_id, key_id)
    admins = select(api_keys.c.id).where(_ADMIN, api_keys.c.revoked_at.is_(None))
    connection.execute(admins.order_by(api_keys.c.tenant_id, api_keys.c.id).with_for_update()).all()
    here = select(api_keys).where(api_keys.c.tenant_id == tenant_id, api_keys.c.id == key_id)
    row = connection.execute(here.with_for_update()).first()
    return None if row is None else _key_of(row)


def _alone(connection: Connection, key: KeyRecord, now: float) -> bool:
    """Whether it is an admin key, and no other one works that is there to stay."""
    rows = connection.execute(select(api_keys).where(_ADMIN, api_keys.c.id != key.id))
    return "admin" in key.scopes and all(_key_of(row).state(now) != "active" for row in rows)


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
        replaces=row.replaces,
        replaced_by=row.replaced_by,
    )
