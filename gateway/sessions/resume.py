"""A turn's stream from any sequence number on, wherever the turn runs or ran.

here, or ended here a moment ago   from the log in memory
at another gateway                 from the events it stores a few times a second
long ended                         made from the stored turn: one piece for each item
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import orjson

from gateway.sessions.events import TERMINAL_TYPES, event_json, event_type
from gateway.sessions.replay import ended, events
from gateway.sessions.turn import TurnRoom
from gateway.store.records import TurnRecord

POLL_S = 0.1
TERMINAL_WAIT_S = 2.0  # a turn that ended without its last event stored gets this long, then the record speaks


async def resumed(room: TurnRoom, record: TurnRecord, after: int) -> AsyncGenerator[tuple[int, str, bytes], None]:
    """(sequence number, event type, JSON) of every event past `after`; the last one is terminal."""
    run = room.registry.find(record.tenant_id, record.turn.id)
    if run is not None:
        async with aclosing(run.follow(after)) as live:
            async for seq, event in live:
                yield seq, event_type(event), event_json(seq, event)
        return
    seen = after
    async with aclosing(_stored(room, record, after)) as stored:
        async for seq, kind, data in stored:
            seen = seq
            yield seq, kind, data
            if kind in TERMINAL_TYPES:
                return
    current = await room.store.get_turn(record.tenant_id, record.session_id, record.turn.id)
    if current is None:
        return
    if seen == after and not await room.store.read_events(record.tenant_id, record.session_id, record.turn.id, 0):
        for seq, event in enumerate(events(current), 1):
            if seq > after:
                yield seq, event_type(event), event_json(seq, event)
        return
    last = ended(current)
    yield seen + 1, event_type(last), event_json(seen + 1, last)


async def _stored(room: TurnRoom, record: TurnRecord, after: int) -> AsyncGenerator[tuple[int, str, bytes], None]:
    """Events as they come into the store, until the turn has ended and no more can come."""
    seen, ended_for_s = after, 0.0
    names = (record.tenant_id, record.session_id, record.turn.id)
    while ended_for_s < TERMINAL_WAIT_S:
        found = await room.store.read_events(*names, seen)
        for seq, data in found:
            seen = seq
            yield seq, orjson.loads(data)["type"], data
        if found:
            continue
        current = await room.store.get_turn(*names)
        if current is None:
            return
        session = await room.store.get_session(record.tenant_id, record.session_id)
        running = current.turn.status == "in_progress" and session is not None and session.status == "running"
        if not running and not await room.store.read_events(*names, 0):
            return
        ended_for_s = 0.0 if running else ended_for_s + POLL_S
        await asyncio.sleep(POLL_S)
