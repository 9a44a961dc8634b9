"""Erases a session: every row that holds anything of it. A receipt with counts stays, and what places have to forget.

one transaction   rows deleted, receipt written, one forgetting for each place (a replica, a gateway's memory, …)
after it          whoever reaches a place has it forget: `gateway.sessions.forgetting`
"""

from __future__ import annotations

import secrets

from sqlalchemy import BindParameter, Connection, Integer, Text, bindparam, literal, null, select

from gateway.store.audit import write_line
from gateway.store.audit_records import AuditLine, expired
from gateway.store.erasure_records import ErasureScope, Receipt
from gateway.store.rows import encode
from gateway.store.tables import (
    compactions,
    erasures,
    events,
    forgettings,
    handovers,
    items,
    places,
    session_metadata,
    sessions,
    turns,
)
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
WORDS = tuple(name for name, _ in _DELETES)  # the tables that hold what was said
_LOCK = select(sessions.c.id).where(sessions.c.tenant_id == _TENANT, sessions.c.id == _SESSION).with_for_update()


def erase_session(
    connection: Connection,
    tenant_id: str,
    session_id: str,
    now: float,
    line: AuditLine | None,
    *,
    scope: ErasureScope = "session",
) -> Receipt | None:
    """Delete the session's rows; write the receipt, what is to be forgotten, and `line` into the audit log (None: it
    never was told of).

    None: there is no such session.
    """
    erased = delete_session(connection, tenant_id, session_id)
    if erased is None:
        return None
    receipt_id = new_id()
    waits = forget_later(connection, tenant_id, session_id, receipt_id, now)
    receipt = Receipt(
        id=receipt_id,
        scope=scope,
        session_id=session_id,
        subject=None,
        sessions=1,
        status="pending" if waits else "done",
        erased=erased,
        at=now,
        completed_at=None if waits else now,
    )
    connection.execute(
        erasures.insert(),
        {
            "tenant_id": tenant_id,
            "id": receipt.id,
            "session_id": session_id,
            "erased": encode(erased),
            "at": now,
            "scope": scope,
            "status": receipt.status,
            "completed_at": receipt.completed_at,
        },
    )
    if line is not None:
        write_line(connection, line, now)
    return receipt


def new_id() -> str:
    """Of a receipt."""
    return f"ers_{secrets.token_hex(16)}"


def delete_session(connection: Connection, tenant_id: str, session_id: str) -> dict[str, int] | None:
    """Table -> rows deleted. None: there is no such session."""
    if connection.execute(_LOCK, {"b_tenant": tenant_id, "b_session": session_id}).first() is None:
        return None
    return delete_rows(connection, tenant_id, session_id)


def erase_expired_session(connection: Connection, tenant_id: str, session_id: str, now: float) -> Receipt | None:
    """The same for one whose time is over, by whoever comes upon it first."""
    return erase_session(connection, tenant_id, session_id, now, expired(tenant_id, session_id), scope="expired")


def delete_rows(connection: Connection, tenant_id: str, session_id: str) -> dict[str, int]:
    """Table -> rows deleted."""
    place = {"b_tenant": tenant_id, "b_session": session_id}
    forget_names(connection, tenant_id, session_id)
    return {name: connection.execute(statement, place).rowcount for name, statement in _DELETES}


def forget_later(
    connection: Connection, tenant_id: str, session_id: str, erasure_id: str, now: float, *, replicas_only: bool = False
) -> int:
    """Note for every place that it has to forget the session, due now -> places."""
    known = (
        forgettings.c.tenant_id == tenant_id,
        forgettings.c.erasure_id == erasure_id,
        forgettings.c.session_id == session_id,
    )
    connection.execute(forgettings.delete().where(*known))  # noted before: due again, from its first try
    named = select(
        literal(tenant_id, Text),
        literal(erasure_id, Text),
        literal(session_id, Text),
        places.c.name,
        literal(now, places.c.seen_at.type),
        literal(0, Integer),
        null(),
    )
    if replicas_only:
        named = named.where(places.c.kind.in_(("replica", "engine")))
    columns = ("tenant_id", "erasure_id", "session_id", "place", "due_at", "tries", "error")
    return connection.execute(forgettings.insert().from_select(columns, named)).rowcount
