"""Stored records as the JSON that routes answer with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.sessions.compaction_events import shown
from gateway.sessions.history import TAIL
from gateway.store.compaction_records import CompactionRecord
from gateway.store.records import Receipt, SessionRecord, TurnRecord


def session_json(record: SessionRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "session",
        "title": record.title,
        "model": record.model,
        "system": record.system,
        "tools": list(record.tools),
        "metadata": dict(record.metadata),
        "policy": dict(record.policy),
        "user_ref": record.user_ref,
        "status": record.status,
        "head_turn_id": record.head_turn_id,
        "turns": record.next_seq - 1,
        "version": record.version,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "expires_at": record.expires_at,
        "archived_at": record.archived_at,
    }


def turn_json(record: TurnRecord, *, token_ids: bool = False) -> dict[str, Any]:
    turn = record.turn
    told: dict[str, Any] = {
        "id": turn.id,
        "object": "turn",
        "session_id": record.session_id,
        "parent_id": turn.parent_id,
        "seq": turn.seq,
        "status": turn.status,
        "model": record.model,
        "input": [dict(item.payload) for item in turn.input],
        "output": [dict(item.payload) for item in turn.output],
        "finish_reason": record.finish_reason,
        "usage": dict(record.usage),
        "placement": dict(record.placement),
        "prefix_report": dict(record.prefix_report),
        "pinned": record.pinned,
        "metadata": {k: v for k, v in record.metadata.items() if k != TAIL},
        "error": record.error,
        "created_at": record.created_at,
        "completed_at": record.completed_at,
    }
    if token_ids and record.tokens is not None:
        told["tokens"] = {
            "fingerprint": record.tokens.fingerprint,
            "base_tokens": record.tokens.base_tokens,
            "path_tokens": record.tokens.path_tokens,
            "prompt_ids": ids_of(record.tokens.prompt_ids),
            "output_ids": ids_of(record.tokens.output_ids),
        }
    return told


def ids_of(packed: bytes) -> list[int]:
    """u32 little-endian as numbers."""
    return [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    return {
        "object": "erasure",
        "id": receipt.id,
        "scope": receipt.scope,
        "session_id": receipt.session_id,
        "user_digest": receipt.subject,
        "status": receipt.status,
        "sessions": receipt.sessions,
        "erased": dict(receipt.erased),
        "places": {name: dict(told) for name, told in receipt.places.items()},
        "at": receipt.at,
        "completed_at": receipt.completed_at,
    }


def deleted_json(receipt: Receipt) -> dict[str, Any]:
    """A session that is gone."""
    told = receipt_json(receipt)
    shown = {name: told[name] for name in ("status", "erased", "places", "at", "completed_at")}
    return {"object": "session.deleted", "id": receipt.session_id, "deleted": True, "erasure": receipt.id, **shown}


def compaction_json(record: CompactionRecord) -> dict[str, Any]:
    view: Mapping[str, Any] = record.view or {}
    return {**shown(record), **{name: list(view.get(name, ())) for name in ("segments", "elisions")}}
