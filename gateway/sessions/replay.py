"""A stored turn as the events it once was: for retries under an idempotency key, and for streams resumed late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compression.conversation import Item
from gateway.sessions.history import TAIL
from gateway.sessions.run import Piece, TurnEnded, TurnEvent, TurnRun, TurnStarted
from gateway.store.records import TurnRecord


def metadata_of(record: TurnRecord) -> dict[str, Any]:
    told = {key: value for key, value in record.metadata.items() if key != TAIL}
    return {**told, **record.placement, "prefix_report": record.prefix_report}


def ended(record: TurnRecord) -> TurnEnded:
    turn = record.turn
    return TurnEnded(
        turn.id,
        record.session_id,
        turn.seq,
        turn.status,
        record.finish_reason,
        turn.output,
        record.usage,
        metadata_of(record),
        record.error,
    )


def events(record: TurnRecord) -> Iterator[TurnEvent]:
    """Started, one piece for each item of the answer, ended."""
    turn = record.turn
    yield TurnStarted(turn.id, record.session_id, turn.seq, record.model, record.created_at, metadata_of(record))
    calls = 0
    for item in turn.output:
        if item.type == "function_call":
            yield _call(item, calls)
            calls += 1
        else:
            yield Piece("reasoning" if item.type == "reasoning" else "content", item.text)
    yield ended(record)


def _call(item: Item, index: int) -> Piece:
    return Piece("tool_call", item.payload["arguments"], index, item.payload["call_id"], item.payload["name"])


def replayed(record: TurnRecord) -> TurnRun:
    """A run that has already ended, to be followed like a live one."""
    run = TurnRun(
        record.turn.id,
        tenant_id=record.tenant_id,
        session_id=record.session_id,
        on_disconnect=record.on_disconnect,
    )
    for event in events(record):
        run.emit(event)
    return run
