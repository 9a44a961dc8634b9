"""A turn's events from their JSON, as they went into the store, to be told as a response's. Plain functions."""

from __future__ import annotations

from typing import Any

import orjson

from compression.conversation import Item
from engines.contract import TokenLogprob
from gateway.sessions.run import Piece, Stored, TurnEnded, TurnEvent, TurnStarted

PIECES = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "tool_call",
}


def read(data: bytes) -> TurnStarted | Piece | TurnEnded | None:
    """None: an event that is none of the answer's, of a compaction."""
    told = orjson.loads(data)
    kind = told["type"]
    if (piece := PIECES.get(kind)) is not None:
        logprobs = tuple(_logprob(each) for each in told.get("logprobs", ()))
        return Piece(
            piece,  # type: ignore[arg-type]
            told["delta"],
            told.get("output_index", 0),
            told.get("call_id"),
            told.get("name"),
            logprobs,
        )
    if kind == "session.turn.started":
        turn = told["turn"]
        names = ("id", "session_id", "seq", "model", "created_at", "metadata")
        return TurnStarted(*(turn[name] for name in names))
    return _ended(told["turn"]) if kind.startswith("session.turn.") else None


def plain(event: TurnEvent) -> TurnStarted | Piece | TurnEnded | None:
    """An event of a run, whichever gateway it comes from; None as for `read`."""
    if isinstance(event, Stored):
        return read(event.json)
    return event if isinstance(event, TurnStarted | Piece | TurnEnded) else None


def _ended(turn: dict[str, Any]) -> TurnEnded:
    output = tuple(Item(payload["type"], payload) for payload in turn["output"])
    return TurnEnded(
        turn["id"],
        turn["session_id"],
        turn["seq"],
        turn["status"],
        turn["finish_reason"],
        output,
        turn["usage"],
        turn["metadata"],
        turn["error"],
    )


def _logprob(told: dict[str, Any]) -> TokenLogprob:
    top = tuple((0, each["token"], each["logprob"]) for each in told["top_logprobs"])
    return TokenLogprob(0, told["token"], told["logprob"], top)
