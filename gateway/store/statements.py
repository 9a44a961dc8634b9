"""The statements of the hot path, built once. Every one of them names the tenant."""

from __future__ import annotations

from sqlalchemy import BindParameter, Delete, Executable, Table, Update, bindparam, select

from gateway.store.rows import OUTPUT
from gateway.store.tables import events, items, session_metadata, sessions, turn_tokens, turns

_TENANT: BindParameter[str] = bindparam("b_tenant")
_ID: BindParameter[str] = bindparam("b_id")
_IDS: BindParameter[str] = bindparam("b_ids", expanding=True)

# SQLite uses no index for (a, b) IN ((..), ..), so these ask one tenant at a time.
LOCK_SESSIONS = (
    select(
        sessions.c.id,
        sessions.c.head_turn_id,
        sessions.c.next_seq,
        sessions.c.fence,
        sessions.c.lease_owner,
        sessions.c.lease_until,
        sessions.c.running_turn_id,
        sessions.c.cancel_requested,
        sessions.c.user_ref,
        sessions.c.origin,
        sessions.c.expires_at,
        sessions.c.version,
    )
    .where(sessions.c.tenant_id == _TENANT, sessions.c.id.in_(_IDS))
    .order_by(sessions.c.id)  # the order in which PostgreSQL locks them: the same in every gateway
    .with_for_update()
)

TURNS_BY_KEY = select(
    turns.c.session_id,
    turns.c.idempotency_key,
    turns.c.id,
    turns.c.parent_id,
    turns.c.seq,
    turns.c.status,
    turns.c.attempt,
    turns.c.request_hash,
    turns.c.finish_reason,
).where(
    turns.c.tenant_id == _TENANT,
    turns.c.session_id.in_(bindparam("b_sessions", expanding=True)),
    turns.c.idempotency_key.in_(bindparam("b_keys", expanding=True)),
)
PLACES = select(turns.c.id, turns.c.session_id, turns.c.seq, turns.c.fence, turns.c.attempt, turns.c.status).where(
    turns.c.tenant_id == _TENANT, turns.c.id.in_(_IDS)
)

UPDATE_SESSION = (
    sessions.update()
    .where(sessions.c.tenant_id == _TENANT, sessions.c.id == _ID)
    .values(
        {
            name: bindparam(name)
            for name in (
                "head_turn_id",
                "next_seq",
                "fence",
                "lease_owner",
                "lease_until",
                "running_turn_id",
                "cancel_requested",
                "updated_at",
            )
        }
    )
)


def _turn_update(*names: str) -> Update:
    matching = turns.update().where(turns.c.tenant_id == _TENANT, turns.c.id == _ID)
    return matching.values({name: bindparam(name) for name in names})


FINISH_TURN = _turn_update(
    "status",
    "completed_at",
    "finish_reason",
    "meaning",
    "fingerprint",
    "base_tokens",
    "path_tokens",
    "path_digest",
    "open_answer",
    "usage",
    "placement",
    "prefix_report",
    "error",
    "metadata",
)
LAPSE_TURN = _turn_update("status", "completed_at").where(turns.c.status == "in_progress")
REOPEN_TURN = _turn_update("fence", "attempt", "model", "on_disconnect").values(
    status="in_progress",
    completed_at=None,
    finish_reason=None,
    meaning=None,
    fingerprint=None,
    base_tokens=None,
    path_tokens=None,
    path_digest=None,
    open_answer=0,
    usage="{}",
    placement="{}",
    prefix_report="{}",
    error=None,
    metadata="{}",
)
REKEY_TURN = turns.update().where(turns.c.tenant_id == _TENANT, turns.c.id == _ID).values(idempotency_key=None)

INSERT_SESSION = sessions.insert()
INSERT_METADATA = session_metadata.insert()
INSERT_TURN = turns.insert()
INSERT_ITEM = items.insert()
INSERT_TOKENS = turn_tokens.insert()
INSERT_EVENT = events.insert()


def _delete(table: Table) -> Delete:
    return table.delete().where(table.c.tenant_id == _TENANT, table.c.turn_id == _ID)


DELETE_OUTPUT = _delete(items).where(items.c.part == OUTPUT)
DELETE_ITEMS = _delete(items)
DELETE_TOKENS = _delete(turn_tokens)
DELETE_EVENTS = _delete(events)
DELETE_TURN = turns.delete().where(turns.c.tenant_id == _TENANT, turns.c.id == _ID)

# Parents before children; what frees a key or a seq before what takes it.
ORDER: tuple[Executable, ...] = (
    INSERT_SESSION,
    INSERT_METADATA,
    LAPSE_TURN,
    REKEY_TURN,
    DELETE_OUTPUT,
    DELETE_TOKENS,
    DELETE_EVENTS,
    DELETE_ITEMS,
    DELETE_TURN,
    REOPEN_TURN,
    INSERT_TURN,
    FINISH_TURN,
    INSERT_ITEM,
    INSERT_TOKENS,
    INSERT_EVENT,
    UPDATE_SESSION,
)
