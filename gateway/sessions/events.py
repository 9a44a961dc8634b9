"""A turn's events as JSON, as they go over the wire and into the store, so that a stream can be resumed anywhere.

Event names follow OpenAI's Responses streams; `session.turn.*` are ours.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from engines.contract import TokenLogprob
from gateway.sessions.compaction_events import shown
from gateway.sessions.run import Compacted, Piece, Stored, TurnEnded, TurnEvent, TurnRun, TurnStarted
from gateway.store.records import DuplicateId, LeaseLost, StoreUnavailable
from gateway.store.sessions import Store

FLUSH_EVERY_S = 0.25

_DELTA_TYPE = {
    "content": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "tool_call": "response.function_call_arguments.delta",
}
TERMINAL_TYPES = frozenset(f"session.turn.{status}" for status in ("completed", "incomplete", "failed"))


def event_json(seq: int, event: TurnEvent) -> bytes:
    if isinstance(event, Stored):
        return event.json
    return orjson.dumps({"sequence_number": seq, **_fields(event)})


def event_type(event: TurnEvent) -> str:
    if isinstance(event, Piece):
        return _DELTA_TYPE[event.kind]
    if isinstance(event, TurnStarted):
        return "session.turn.started"
    if isinstance(event, Stored):
        return event.type
    if isinstance(event, Compacted):
        return f"session.compaction.{event.what}"
    return f"session.turn.{event.status}"


def _fields(event: Piece | TurnStarted | Compacted | TurnEnded) -> dict[str, Any]:
    kind = event_type(event)
    if isinstance(event, Piece):
        told: dict[str, Any] = {"type": kind, "delta": event.text}
        if event.kind == "tool_call":
            told["output_index"] = event.index
            if event.id is not None:
                told |= {"call_id": event.id, "name": event.name}
        if event.logprobs:
            told["logprobs"] = [logprob_json(p) for p in event.logprobs]
        return told
    if isinstance(event, Compacted):
        return {"type": kind, "compaction": shown(event.record)}
    if isinstance(event, TurnStarted):
        turn = {
            "id": event.turn_id,
            "session_id": event.session_id,
            "seq": event.seq,
            "status": "in_progress",
            "model": event.model,
            "created_at": event.created_at,
            "metadata": event.metadata,
        }
        return {"type": kind, "turn": turn}
    return {"type": kind, "turn": ended_json(event)}


def ended_json(event: TurnEnded) -> dict[str, Any]:
    return {
        "id": event.turn_id,
        "session_id": event.session_id,
        "seq": event.seq,
        "status": event.status,
        "finish_reason": event.finish_reason,
        "output": [dict(item.payload) for item in event.output],
        "usage": event.usage,
        "metadata": event.metadata,
        "error": event.error,
    }


def logprob_json(p: TokenLogprob) -> dict[str, Any]:
    """One token as OpenAI's chat completions show it."""
    top = [{"token": text, "logprob": value, "bytes": list(text.encode())} for _, text, value in p.top]
    return {"token": p.text, "logprob": p.logprob, "bytes": list(p.text.encode()), "top_logprobs": top}


class EventLog:
    """Writes a running turn's events to the store a few times a second, in order, the last ones before its end."""

    def __init__(self, store: Store, run: TurnRun, *, written: int = 0) -> None:
        """`written`: of the run's events, how many are in the store."""
        self._store = store
        self._run = run
        self._written = written
        self._refused = False  # the turn is another gateway's now, or gone with its session
        self._lock = asyncio.Lock()
        self._task = asyncio.create_task(self._write_on(), name=f"events-{run.turn_id}")

    async def _write_on(self) -> None:
        while not self._refused:
            await self._run.wait_beyond(self._written)
            await self.flush()
            await asyncio.sleep(FLUSH_EVERY_S)

    @property
    def complete(self) -> bool:
        """Whether all that was emitted is in the store."""
        return self._written == len(self._run.events)

    async def flush(self) -> None:
        """Store what has been emitted so far; a store that is away is tried again with the next ones.

        A turn whose session was deleted, or taken over, is refused: nobody will read these events.
        """
        async with self._lock:
            try:
                try:
                    await self._append()
                except DuplicateId:  # an earlier flush is stored, though its commit was not heard of
                    await self._catch_up()
            except LeaseLost:
                self._refused = True
            except StoreUnavailable:
                return

    async def _append(self) -> None:
        run, events = self._run, self._run.events[self._written :]
        if not events or run.session_id is None or self._refused:
            return
        first = self._written + 1
        encoded = [event_json(first + i, event) for i, event in enumerate(events)]
        await self._store.append_events(run.tenant_id, run.session_id, run.turn_id, first, encoded, fence=run.fence)
        self._written += len(events)

    async def _catch_up(self) -> None:
        assert self._run.session_id is not None
        names = (self._run.tenant_id, self._run.session_id, self._run.turn_id)
        self._written = (await self._store.read_events(*names, self._written))[-1][0]
        await self._append()

    async def close(self) -> None:
        """Store the terminal event and stop."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()
