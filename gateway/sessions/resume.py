"""A turn's stream from any sequence number on, wherever the turn runs or ran.

here, or ended here a moment ago   from the log in memory
at another gateway                 from the events it stores a few times a second
long ended                         made from the stored turn: one piece for each item
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import orjson

from gateway.sessions.events import TERMINAL_TYPES, event_json, event_type
from gateway.sessions.replay import ended, events
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import TurnEnded, TurnRun
from gateway.store.records import TurnRecord

POLL_S = 0.1
TERMINAL_WAIT_S = 2.0  # a turn that ended without its last event stored gets this long, then the record speaks

Told = tuple[int, str, bytes]  # sequence number, event type, JSON


async def resumed(
    room: TurnRoom, record: TurnRecord, after: int, *, watching: bool = False
) -> AsyncGenerator[Told, None]:
    """Every event past `after`, once and in order. The last one is terminal, unless the reader has that already.

    `watching`: the reader counts as none (see `TurnRun.follow`)."""
    run = room.registry.find(record.tenant_id, record.turn.id, record.fence)
    if run is not None:
        async with aclosing(_live(run, after, watching)) as live:
            async for told in live:
                yield told
        return
    seen = after
    async with aclosing(_stored(room, record, after)) as stored:
        async for told in stored:
            seen = told[0]
            yield told
            if told[1] in TERMINAL_TYPES:
                return
    current = await room.store.get_turn(record.tenant_id, record.session_id, record.turn.id)
    run = _here(room, current)
    if run is not None and current is not None and (current.attempt == record.attempt or not seen):  # it came here
        async with aclosing(_live(run, seen, watching)) as live:
            async for told in live:
                yield told
        return
    current = await _settled(room, record)
    if current is None:
        return
    all_stored = await _events(room, current, 0)
    if current.attempt != record.attempt and seen > 0:
        yield _last(seen + 1, _restarted(current))
    elif not all_stored:
        for seq, event in enumerate(events(current), 1):
            if seq > after:
                yield seq, event_type(event), event_json(seq, event)
    elif all_stored[-1][1] not in TERMINAL_TYPES:
        yield _last(max(seen, all_stored[-1][0]) + 1, ended(current))


async def _live(run: TurnRun, after: int, watching: bool) -> AsyncGenerator[Told, None]:
    async with aclosing(run.follow(after, watching=watching)) as live:
        async for seq, event in live:
            yield seq, event_type(event), event_json(seq, event)


def _here(room: TurnRoom, record: TurnRecord | None) -> TurnRun | None:
    """The turn where it runs at this gateway."""
    return room.registry.find(record.tenant_id, record.turn.id, record.fence) if record is not None else None


def _last(seq: int, event: TurnEnded) -> Told:
    return seq, event_type(event), event_json(seq, event)


def _restarted(record: TurnRecord) -> TurnEnded:
    """What a reader of an earlier attempt is told: the events it has belong to an answer that will not be."""
    error = {"type": "server_error", "code": "turn_restarted", "message": "the turn runs again; read it from its start"}
    return replace(ended(record), status="failed", finish_reason="error", output=(), error=error)


async def _events(room: TurnRoom, record: TurnRecord, after: int) -> list[Told]:
    found = await room.store.read_events(record.tenant_id, record.session_id, record.turn.id, after)
    return [(seq, orjson.loads(data)["type"], data) for seq, data in found]


async def _settled(room: TurnRoom, record: TurnRecord) -> TurnRecord | None:
    """The turn as it ended; one whose gateway is gone is incomplete from now on. None: the session was deleted."""
    names = (record.tenant_id, record.session_id, record.turn.id)
    current = await room.store.get_turn(*names)
    if current is not None and current.turn.status == "in_progress" and current.attempt == record.attempt:
        await room.store.lapse_leases()
        current = await room.store.get_turn(*names)
    return current


async def _stored(room: TurnRoom, record: TurnRecord, after: int) -> AsyncGenerator[Told, None]:
    """Events of this attempt as they come into the store, until the turn has ended and no more can come."""
    seen, ended_for_s = after, 0.0
    while ended_for_s < TERMINAL_WAIT_S:
        found = await _events(room, record, seen)
        session = await room.store.get_session(record.tenant_id, record.session_id)
        current = await room.store.get_turn(record.tenant_id, record.session_id, record.turn.id)
        if current is None or session is None:
            return
        if current.attempt != record.attempt:  # it runs again: what was found may be the other attempt's
            if seen > 0:
                return
            record = current
            continue
        for told in found:
            seen = told[0]
            yield told
        if _here(room, current) is not None:
            return
        if found:
            continue
        running = current.turn.status == "in_progress" and session.status == "running"
        if not running:
            stored = await _events(room, record, 0)
            if stored and stored[-1][0] > seen:  # they came since this round looked
                continue
            if not stored or stored[-1][1] in TERMINAL_TYPES:
                return
        ended_for_s = 0.0 if running else ended_for_s + POLL_S
        await asyncio.sleep(POLL_S)
