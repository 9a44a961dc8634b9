"""What waits for the writer: commands with their rows already encoded, so that a bad value fails its caller alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.store.records import BeginTurn, FinishTurn
from gateway.store.rows import INPUT, OUTPUT, encode, item_rows, metadata_rows, session_row, size, storable


@dataclass(frozen=True, slots=True)
class Begin:
    turn: BeginTurn
    items: list[dict[str, Any]]
    session: dict[str, Any]  # the row of the session to create, but for its instants; {} where none is
    metadata: list[dict[str, Any]]
    notes: str  # the turn's own metadata, as it will be kept

    @property
    def bytes(self) -> int:
        """What its session then stores more."""
        return sum(size(item["payload"]) for item in self.items)

    @property
    def key(self) -> tuple[str, str]:
        return self.turn.tenant_id, self.turn.session_id


@dataclass(frozen=True, slots=True)
class Finish:
    turn: FinishTurn
    items: list[dict[str, Any]]
    row: dict[str, Any]  # parameters of the turn's update

    @property
    def bytes(self) -> int:
        """What its session then stores more."""
        ids = len(self.row["prompt_ids"] or b"") + len(self.row["output_ids"] or b"")
        return ids + sum(size(item["payload"]) for item in self.items)

    @property
    def key(self) -> tuple[str, str]:
        return self.turn.tenant_id, self.turn.session_id


@dataclass(frozen=True, slots=True)
class Release:
    tenant_id: str
    session_id: str
    turn_id: str
    fence: int

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant_id, self.session_id


@dataclass(frozen=True, slots=True)
class Append:
    tenant_id: str
    session_id: str
    turn_id: str
    first_seq: int
    events: tuple[bytes, ...]
    fence: int | None

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant_id, self.session_id


Command = Begin | Finish | Release | Append


def begin(turn: BeginTurn) -> Begin:
    storable(turn.tenant_id, turn.session_id, turn.turn_id, turn.model, turn.owner, turn.parent, turn.idempotency_key)
    storable(turn.user_ref)
    if turn.create is not None and (turn.create.tenant_id, turn.create.id) != (turn.tenant_id, turn.session_id):
        raise ValueError("BeginTurn.create names another session than the turn")
    items = item_rows(turn.tenant_id, turn.turn_id, INPUT, turn.input)
    notes = encode(turn.metadata)
    if turn.create is None:
        return Begin(turn, items, {}, [], notes)
    metadata = metadata_rows(turn.tenant_id, turn.session_id, turn.create.metadata)
    return Begin(turn, items, session_row(turn.create, 0.0), metadata, notes)


def finish(turn: FinishTurn) -> Finish:
    if turn.status == "in_progress":
        raise ValueError("a turn is finished as completed, incomplete or failed")
    tokens = turn.tokens
    storable(turn.tenant_id, turn.session_id, turn.turn_id, turn.finish_reason, tokens.fingerprint if tokens else None)
    row = {
        "b_tenant": turn.tenant_id,
        "b_id": turn.turn_id,
        "status": turn.status,
        "finish_reason": turn.finish_reason,
        "meaning": turn.meaning,
        "fingerprint": tokens and tokens.fingerprint,
        "base_tokens": tokens and tokens.base_tokens,
        "path_tokens": tokens and tokens.path_tokens,
        "path_digest": tokens and tokens.path_digest,
        "open_answer": int(tokens is not None and tokens.open_answer),
        "prompt_ids": tokens and tokens.prompt_ids,
        "output_ids": tokens and tokens.output_ids,
        "usage": encode(turn.usage),
        "placement": encode(turn.placement),
        "prefix_report": encode(turn.prefix_report),
        "error": None if turn.error is None else encode(turn.error),
        "metadata": encode(turn.metadata),
    }
    return Finish(turn, item_rows(turn.tenant_id, turn.turn_id, OUTPUT, turn.output), row)


def append(
    tenant_id: str, session_id: str, turn_id: str, first_seq: int, events: Sequence[bytes], fence: int | None
) -> Append:
    storable(tenant_id, session_id, turn_id)
    return Append(tenant_id, session_id, turn_id, first_seq, tuple(events), fence)
