"""The statements of the hot path, built once. Every one of them names the tenant."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    BindParameter,
    ClauseElement,
    Column,
    ColumnElement,
    Delete,
    Select,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    or_,
    select,
)

from gateway.store.rows import OUTPUT
from gateway.store.tables import COMMITTED, RUNNING, compactions, events, items, session_metadata, sessions, turns

_TENANT: BindParameter[str] = bindparam("b_tenant", type_=Text())
_ID: BindParameter[str] = bindparam("b_id", type_=Text())


def _in(column: Column[Any], name: str, size: int) -> ColumnElement[bool]:
    return column.in_([bindparam(f"{name}_{place}", type_=column.type) for place in range(size)])


# SQLite uses no index for (a, b) IN ((..), ..), so these ask one tenant at a time.


@cache
def lock_sessions(size: int) -> Select[Any]:
    """Columns in the order of LiveSession's fields; rows in the order in which every gateway locks them."""
    columns = (
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
        sessions.c.view_version,
        sessions.c.bytes,
    )
    mine = select(*columns).where(sessions.c.tenant_id == _TENANT, _in(sessions.c.id, "id", size))
    return mine.order_by(sessions.c.id).with_for_update()


_later = turns.alias("later")
_BUILT_ON = or_(
    select(_later.c.id)
    .where(_later.c.tenant_id == turns.c.tenant_id, _later.c.session_id == turns.c.session_id)
    .where(_later.c.seq > turns.c.seq, _later.c.parent_id == turns.c.id)
    .correlate(turns)
    .exists(),
    select(compactions.c.id)
    .where(compactions.c.tenant_id == turns.c.tenant_id, compactions.c.session_id == turns.c.session_id)
    .where(compactions.c.head_turn_id == turns.c.id, or_(RUNNING, COMMITTED))
    .correlate(turns)
    .exists(),
).label("built_on")


@cache
def turns_by_key(size: int) -> Select[Any]:
    """Session, key, then the columns in the order of LiveTurn's fields."""
    columns = (
        turns.c.session_id,
        turns.c.idempotency_key,
        turns.c.id,
        turns.c.parent_id,
        turns.c.seq,
        turns.c.status,
        turns.c.attempt,
        turns.c.request_hash,
        turns.c.finish_reason,
        _BUILT_ON,
    )
    named = [  # tenant and all in each, and no two IN lists: else SQLite looks through every key of the tenant
        and_(
            turns.c.tenant_id == _TENANT,
            turns.c.session_id == bindparam(f"session_{place}"),
            turns.c.idempotency_key == bindparam(f"key_{place}"),
        )
        for place in range(size)
    ]
    return select(*columns).where(or_(*named))


@cache
def places(size: int) -> Select[Any]:
    """Id, then the columns in the order of Place's fields."""
    columns = (turns.c.id, turns.c.session_id, turns.c.seq, turns.c.fence, turns.c.attempt, turns.c.status)
    return select(*columns).where(turns.c.tenant_id == _TENANT, _in(turns.c.id, "id", size))


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
                "bytes",
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
    "prompt_ids",
    "output_ids",
)
LAPSE_TURN = _turn_update("status", "completed_at").where(turns.c.status == "in_progress")
REOPEN_TURN = _turn_update("fence", "attempt", "model", "on_disconnect", "metadata", "key_id").values(
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
    prompt_ids=None,
    output_ids=None,
)
REKEY_TURN = turns.update().where(turns.c.tenant_id == _TENANT, turns.c.id == _ID).values(idempotency_key=None)

_NOBODYS = sessions.c.user_ref.is_(None)
OWN_SESSION = sessions.update().where(sessions.c.tenant_id == _TENANT, sessions.c.id == _ID, _NOBODYS)
OWN_SESSION = OWN_SESSION.values(user_ref=bindparam("user_ref"))
OWN_TURNS = turns.update().where(turns.c.tenant_id == _TENANT, turns.c.session_id == _ID, turns.c.user_ref == "")
OWN_TURNS = OWN_TURNS.values(user_ref=bindparam("user_ref"))

INSERT_SESSION = sessions.insert()
INSERT_METADATA = session_metadata.insert()
INSERT_TURN = turns.insert()
INSERT_ITEM = items.insert()
INSERT_EVENT = events.insert()


def _delete(table: Table) -> Delete:
    return table.delete().where(table.c.tenant_id == _TENANT, table.c.turn_id == _ID)


DELETE_OUTPUT = _delete(items).where(items.c.part == OUTPUT)
DELETE_ITEMS = _delete(items)
DELETE_EVENTS = _delete(events)
DELETE_TURN = turns.delete().where(turns.c.tenant_id == _TENANT, turns.c.id == _ID)

# Parents before children; what frees a key or a seq before what takes it.
ORDER: tuple[ClauseElement, ...] = (
    INSERT_SESSION,
    INSERT_METADATA,
    OWN_SESSION,
    OWN_TURNS,
    LAPSE_TURN,
    REKEY_TURN,
    DELETE_OUTPUT,
    DELETE_EVENTS,
    DELETE_ITEMS,
    DELETE_TURN,
    REOPEN_TURN,
    INSERT_TURN,
    FINISH_TURN,
    INSERT_ITEM,
    INSERT_EVENT,
    UPDATE_SESSION,
)
