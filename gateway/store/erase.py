"""Erases a session: every row that holds anything of it. A receipt with counts stays."""

from __future__ import annotations

import secrets

from sqlalchemy import BindParameter, Connection, bindparam, select

from gateway.store.audit import write_line
from gateway.store.audit_records import AuditLine, expired
from gateway.store.records import Receipt
from gateway.store.rows import encode
from gateway.store.tables import compactions, erasures, events, handovers, items, session_metadata, sessions, turns
from gateway.store.usage import forget_names

_TENANT: BindParameter[str] = bindparam("b_tenant")
_SESSION: BindParameter[str] = bindparam("b_session")
_TURN_IDS = select(turns.c.id).where(turns.c.tenant_id == _TENANT, turns.c.session_id == _SESSION)
_DELETES = (
    *(
        (str(table.name), table.delete().where(table.c.tenant_id == _TENANT, table.c.turn_id.in_(_TURN_IDS)))
        for table in (events, handovers, items)
    ),
    *(
        (str(table.name), table.delete().where(table.c.tenant_id == _TENANT, table.c.session_id == _SESSION))
        for table in (turns, compactions, session_metadata)
    ),
    (str(sessions.name), sessions.delete().where(sessions.c.tenant_id == _TENANT, sessions.c.id == _SESSION)),
)
_LOCK = select(sessions.c.id).where(sessions.c.tenant_id == _TENANT, sessions.c.id == _SESSION).with_for_update()


def erase_session(
    connection: Connection, tenant_id: str, session_id: str, now: float, line: AuditLine | None
) -> Receipt | None:
    """Delete the session's rows, write the receipt, and `line` into the audit log (None: it never was told of).

    None: there is no such session.
    """
    if connection.execute(_LOCK, {"b_tenant": tenant_id, "b_session": session_id}).first() is None:
        return None
    erased = delete_rows(connection, tenant_id, session_id)
    receipt = {
        "tenant_id": tenant_id,
        "id": secrets.token_hex(16),
        "session_id": session_id,
        "erased": encode(erased),
        "at": now,
    }
    connection.execute(erasures.insert(), receipt)
    if line is not None:
        write_line(connection, line, now)
    return Receipt(session_id=session_id, erased=erased, at=now)


def erase_expired_session(connection: Connection, tenant_id: str, session_id: str, now: float) -> Receipt | None:
    """The same for one whose time is over, by whoever comes upon it first."""
    return erase_session(connection, tenant_id, session_id, now, expired(tenant_id, session_id))


def delete_rows(connection: Connection, tenant_id: str, session_id: str) -> dict[str, int]:
    """Table -> rows deleted."""
    place = {"b_tenant": tenant_id, "b_session": session_id}
    forget_names(connection, tenant_id, session_id)
    return {name: connection.execute(statement, place).rowcount for name, statement in _DELETES}
