"""Prefixes that a replica reads in idle time, so that the next turn finds them cached.

before a switch       the path under the new view, and turns that came meanwhile
after a shifted turn  the path as it stands, computed exactly
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from compression.view import View, fold
from engines.contract import EngineError
from gateway.errors import GatewayError
from gateway.policy import min_bits_of
from gateway.sessions.compaction_room import CompactionRoom
from gateway.sessions.history import load
from gateway.sessions.items import messages_from_items
from gateway.sessions.prompt import aside, system_message
from gateway.sessions.snapshot import Snapshot, replica_for, take
from gateway.store.records import HEAD, SessionRecord, StoreUnavailable

log = structlog.get_logger(__name__)

CATCH_UP = 3  # times that turns which came meanwhile are prefilled too, before the switch


@dataclass(slots=True)
class Prefilled:
    """Tokens that the replica had to compute so far; `problem`: why it did not get to the end."""

    tokens: int = 0
    problem: str = ""


async def prefill_view(room: CompactionRoom, taken: Snapshot, view: View, name: str, so_far: Prefilled) -> None:
    """Prefill what `view` makes of the path, where the session's next turn will go; turns that came meanwhile too.

    `so_far` is kept up to date, for whoever stops this.
    """
    for _ in range(CATCH_UP):
        placement = replica_for(taken.session.model, taken.history, room.fleet)
        if placement is None or taken.model is None:
            return
        if room.models.by_ids(taken.session.model, placement.replica) is not taken.model:
            return
        try:
            so_far.tokens += await room.summariser.prefill(
                placement.replica,
                taken.session,
                await rendered(taken, view),
                name=name,
                salt=room.cache_salt(taken.session.tenant_id),
                request_id=f"{view.id}-prefill",
                system_tokens=taken.history.head.marks.system_tokens,
                min_bits=min_bits_of(taken.session.policy),
            )
        except (EngineError, TimeoutError) as error:  # the next turn prefills it then
            so_far.problem = f"the new prefix was not prefilled: {error or 'no answer in time'}"
            return
        try:
            later = await _grown(room, taken)
        except StoreUnavailable:  # the commit waits for the database
            return
        if later is None:
            return
        taken = later


async def _grown(room: CompactionRoom, taken: Snapshot) -> Snapshot | None:
    """The path with the turns that came since; None: there are none, or it goes another way now."""
    session = await room.store.get_session(taken.session.tenant_id, taken.session.id)
    if session is None or session.head_turn_id in (None, taken.head_id):
        return None
    later = await take(
        room.store,
        room.fleet,
        room.models,
        session,
        taken.policy,
        default_max_tokens=room.default_max_tokens,
        parent=HEAD,
    )
    return later if later is not None and taken.head_id in {turn.id for turn in later.turns} else None


async def prefill_path(room: CompactionRoom, session: SessionRecord) -> None:
    """Have the replica compute the session's path as it stands, unless it has; what fails is done by the next turn."""
    try:
        history = await load(room.store, session, HEAD)
        placement = replica_for(session.model, history, room.fleet)
        if placement is not None and history.head.tokens is not None:
            await room.summariser.prefill(
                placement.replica,
                session,
                await history.head.load_ids(),
                name=room.session_name(session.tenant_id, session.id),
                salt=room.cache_salt(session.tenant_id),
                request_id=f"{history.head.turn_id}-exact",
                system_tokens=history.head.marks.system_tokens,
                min_bits=min_bits_of(session.policy),
            )
    except (EngineError, GatewayError, StoreUnavailable, TimeoutError) as error:
        log.warning("a path was not prefilled", session_id=session.id, reason=str(error))


async def rendered(taken: Snapshot, view: View) -> bytes:
    """Ids of the whole path under `view`, up to where its next turn begins, u32 little-endian."""
    assert taken.model is not None
    model, ask = taken.model, taken.ask()
    folded = fold(taken.turns, view, pinned=taken.pinned, placement=model.placement, reasoning=taken.policy.reasoning)
    messages = system_message(ask.system, folded) + messages_from_items(folded.items)
    return await aside(lambda: model.render(messages, tools=ask.tools), messages)
