"""Between values and rows: JSON text, items, sessions, turns, compactions. Knows tables, no statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import Row

from compression.conversation import Item, Turn
from gateway.store.compaction_records import CompactionRecord
from gateway.store.leases import in_force
from gateway.store.records import NewSession, SessionRecord, TurnRecord, TurnTokens, UnstorableText

INPUT, OUTPUT = 0, 1  # items.part


def encode(value: object) -> str:
    """JSON as it will be kept, byte for byte. Raises TypeError for what JSON cannot hold."""
    return orjson.dumps(value, default=_plain).decode()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def storable(*texts: str | None) -> None:
    """Raise UnstorableText for what not every database keeps: PostgreSQL takes no NUL, UTF-8 no surrogate."""
    whole = "".join([text for text in texts if text])
    if "\0" in whole or not (whole.isascii() or _utf8(whole)):
        raise UnstorableText(f"cannot be stored: {whole[:80]!r} holds a NUL or half of a surrogate pair")


def _utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def size(text: str) -> int:
    """In bytes, as UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def item_rows(tenant_id: str, turn_id: str, part: int, items: Sequence[Item]) -> list[dict[str, Any]]:
    return [
        {
            "tenant_id": tenant_id,
            "turn_id": turn_id,
            "part": part,
            "idx": idx,
            "type": item.type,
            "payload": encode(item.payload),
        }
        for idx, item in enumerate(items)
    ]


def item_of(row: Any) -> Item:
    return Item(type=row.type, payload=orjson.loads(row.payload))


def session_row(new: NewSession, now: float) -> dict[str, Any]:
    """The row of a session without turns, its lease free."""
    storable(new.id, new.tenant_id, new.model, new.system, new.title, new.user_ref, new.key_id)
    return {
        "tenant_id": new.tenant_id,
        "id": new.id,
        "version": 1,
        "model": new.model,
        "system": new.system,
        "tools": encode(list(new.tools)),
        "title": new.title,
        "user_ref": new.user_ref,
        "metadata": encode(new.metadata),
        "policy": encode(new.policy),
        "origin": new.origin,
        "head_turn_id": None,
        "next_seq": 1,
        "created_at": now,
        "updated_at": now,
        "expires_at": new.expires_at,
        "archived_at": None,
        "fence": 0,
        "lease_owner": None,
        "lease_until": None,
        "running_turn_id": None,
        "cancel_requested": 0,
        "key_id": new.key_id,
        "bytes": sum(size(text) for text in (new.system or "", encode(list(new.tools)), encode(new.metadata))),
    }


def metadata_rows(tenant_id: str, session_id: str, metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    storable(*metadata.keys(), *metadata.values())
    return [
        {"tenant_id": tenant_id, "session_id": session_id, "key": key, "value": value}
        for key, value in metadata.items()
    ]


def session_of(row: Row[Any], now: float) -> SessionRecord:
    leased = row.running_turn_id is not None and in_force(row.lease_until, now)
    return SessionRecord(
        id=row.id,
        tenant_id=row.tenant_id,
        version=row.version,
        model=row.model,
        system=row.system,
        tools=tuple(orjson.loads(row.tools)),
        title=row.title,
        user_ref=row.user_ref,
        metadata=orjson.loads(row.metadata),
        policy=orjson.loads(row.policy),
        origin=row.origin,
        head_turn_id=row.head_turn_id,
        next_seq=row.next_seq,
        status="running" if leased else "idle",
        created_at=row.created_at,
        updated_at=row.updated_at,
        expires_at=row.expires_at,
        archived_at=row.archived_at,
        view_version=row.view_version,
    )


def turn_of(row: Row[Any], items: Mapping[int, tuple[Item, ...]], ids: tuple[bytes, bytes] = (b"", b"")) -> TurnRecord:
    """The record of a row of `turns`. `items` by part; `ids` are prompt_ids and output_ids."""
    tokens = None
    if row.fingerprint is not None:
        tokens = TurnTokens(
            row.fingerprint, row.base_tokens, *ids, row.path_tokens, row.path_digest, bool(row.open_answer)
        )
    return TurnRecord(
        turn=Turn(
            id=row.id,
            parent_id=row.parent_id,
            seq=row.seq,
            status=row.status,
            input=items.get(INPUT, ()),
            output=items.get(OUTPUT, ()),
        ),
        tenant_id=row.tenant_id,
        session_id=row.session_id,
        model=row.model,
        fence=row.fence,
        idempotency_key=row.idempotency_key,
        request_hash=row.request_hash,
        on_disconnect=row.on_disconnect,
        created_at=row.created_at,
        completed_at=row.completed_at,
        finish_reason=row.finish_reason,
        tokens=tokens,
        meaning=row.meaning,
        usage=orjson.loads(row.usage),
        placement=orjson.loads(row.placement),
        prefix_report=orjson.loads(row.prefix_report),
        error=None if row.error is None else orjson.loads(row.error),
        metadata=orjson.loads(row.metadata),
        pinned=bool(row.pinned),
        attempt=row.attempt,
    )


def compaction_of(row: Row[Any]) -> CompactionRecord:
    return CompactionRecord(
        tenant_id=row.tenant_id,
        session_id=row.session_id,
        id=row.id,
        number=row.number,
        base_id=row.base_id,
        status=row.status,
        trigger=row.trigger,
        head_turn_id=row.head_turn_id,
        anchor_turn_id=row.anchor_turn_id,
        anchor_seq=row.anchor_seq,
        plan=orjson.loads(row.plan),
        view=None if row.view is None else orjson.loads(row.view),
        report=orjson.loads(row.report),
        error=None if row.error is None else orjson.loads(row.error),
        owner=row.owner,
        created_at=row.created_at,
        deadline_at=row.deadline_at,
        completed_at=row.completed_at,
    )
