"""A turn as Anthropic's message, whole and as a stream. Plain functions, and one value that knows no I/O.

message_start · for each block: content_block_start, content_block_delta ..., content_block_stop · message_delta,
message_stop
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from compression.conversation import Item
from gateway.sessions.run import Piece, TurnEnded

Event = dict[str, Any]
STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
KINDS = {"content": "text", "reasoning": "thinking", "tool_call": "tool_use"}


def message_json(turn_id: str, ended: TurnEnded, model: str, told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_frame(turn_id, model),
        "content": [_block(item) for item in ended.output if item.type != "message" or item.text],
        "stop_reason": STOPS.get(ended.finish_reason or "", "end_turn"),
        "usage": usage_json(ended.usage),
        "turnkeep": dict(told),
    }


def _frame(turn_id: str, model: str) -> dict[str, Any]:
    frame = {"id": f"msg_{turn_id.removeprefix('turn_')}", "type": "message", "role": "assistant", "model": model}
    return {**frame, "content": [], "stop_reason": None, "stop_sequence": None}


def _block(item: Item) -> dict[str, Any]:
    if item.type == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if item.type == "function_call":
        called = {"id": item.payload["call_id"], "name": item.payload["name"]}
        return {"type": "tool_use", **called, "input": _arguments(item.payload["arguments"])}
    return {"type": "text", "text": item.text}


def _arguments(text: str) -> dict[str, Any]:
    """As an object, which is what Anthropic's clients take; a model may write something else."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def usage_json(usage: Mapping[str, Any]) -> dict[str, Any]:
    """`input_tokens` are those that were not read from the cache, as Anthropic counts them."""
    given, cached = int(usage.get("prompt_tokens") or 0), int(usage.get("cached_tokens") or 0)
    return {
        "input_tokens": max(0, given - cached),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": int(usage.get("output_tokens") or 0),
    }


@dataclass(slots=True)
class MessageEvents:
    """The events of one answer. One block is open at a time, as Anthropic's streams have it."""

    turn_id: str
    model: str
    _open: tuple[str, int] | None = field(default=None, init=False)  # kind, and which of the calls
    _index: int = field(default=-1, init=False)

    def started(self) -> Event:
        frame = {**_frame(self.turn_id, self.model), "usage": usage_json({})}
        return {"type": "message_start", "message": frame}

    def piece(self, piece: Piece) -> Iterator[Event]:
        kind = KINDS[piece.kind]
        at = kind, piece.index if kind == "tool_use" else 0
        if not piece.text and at != self._open and kind != "tool_use":
            return
        if at != self._open:
            yield from self._closed()
            self._open, self._index = at, self._index + 1
            yield {"type": "content_block_start", "index": self._index, "content_block": _empty(kind, piece)}
        if piece.text:
            yield {"type": "content_block_delta", "index": self._index, "delta": _delta(kind, piece.text)}

    def ended(self, ended: TurnEnded, told: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._closed()
        delta = {"stop_reason": STOPS.get(ended.finish_reason or "", "end_turn"), "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": usage_json(ended.usage), "turnkeep": dict(told)}
        yield {"type": "message_stop"}

    def _closed(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}


def _empty(kind: str, piece: Piece) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": ""}
    if kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": piece.id or "", "name": piece.name or "", "input": {}}


def _delta(kind: str, text: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text_delta", "text": text}
    if kind == "thinking":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}
