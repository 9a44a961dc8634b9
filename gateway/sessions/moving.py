"""Moves one session to another replica while it is idle: its next home chosen, its prefix computed there, then its pin.

    choose -> K/V carried over, or prefilled in idle time -> the head turn's placement names the new home
           -> the old replica forgets it

A turn that comes before the last step is placed as any other; the move is then too late, and leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from compression.budget import Policy
from engines.contract import EngineError
from gateway.fleet.placement import Placement
from gateway.fleet.replica import Replica
from gateway.sessions.compaction_room import CompactionRoom
from gateway.sessions.history import History, load
from gateway.sessions.prefilled import rendered
from gateway.sessions.snapshot import take
from gateway.sessions.suspending import carry
from gateway.sessions.tokens import ModelTokens
from gateway.store.records import HEAD, SessionRecord
from gateway.store.replica_records import PinnedSession

PolicyOf = Callable[[SessionRecord], Policy]
WhereTo = Callable[[str, History], Placement | None]  # (model, history) -> its next home


class NowhereToGo(Exception):
    """No other replica can take the session."""


async def move(
    room: CompactionRoom, pinned: PinnedSession, old: Replica | None, where_to: WhereTo, policy: PolicyOf
) -> bool:
    """False: another turn came first, or the session is gone.

    Raises NowhereToGo, EngineError, TimeoutError, GatewayError, StoreUnavailable: then its pin stays as it was.
    """
    session = await room.store.get_session(pinned.tenant_id, pinned.session_id)
    if session is None or session.head_turn_id != pinned.turn_id or session.status == "running":
        return False
    history = await load(room.store, session, HEAD)
    placement = where_to(session.model, history)
    if placement is None:
        raise NowhereToGo(f"no other replica can take a session of {session.model}")
    tokens = room.models.by_ids(session.model, placement.replica)
    name, salt = room.session_name(session.tenant_id, session.id), room.cache_salt(session.tenant_id)
    as_it_is = placement.changed_from is None and history.counted
    carried = as_it_is and await carry(old, placement.replica, model=session.model, session=name, salt=salt)
    if not carried and tokens is not None and history.head.tokens is not None:
        await room.summariser.prefill(
            placement.replica,
            session,
            await _prefix(room, session, history, policy, tokens if placement.changed_from is not None else None),
            name=name,
            salt=salt,
            request_id=f"{pinned.turn_id}-move",
        )
    home = {"replica": placement.replica.name, "epoch": placement.epoch}
    if not await room.store.rehome(session.tenant_id, session.id, pinned.turn_id, home):
        if await room.store.standing(session.tenant_id, session.id) == "gone":
            await room.store.forget_later(session.tenant_id, session.id)
        return False
    room.registry.heads.forget(session.tenant_id, session.id)
    if old is not None and old.capabilities is not None and old.capabilities.takes_delta:
        with suppress(EngineError):  # it may be gone already
            await old.engine.forget(name, salt)
    return True


async def _prefix(
    room: CompactionRoom, session: SessionRecord, history: History, policy: PolicyOf, other: ModelTokens | None
) -> bytes:
    """Ids that the session's next prompt begins with, u32 little-endian: its path, as it is shown now. `other`: as
    another model than answered it reads it."""
    if other is not None or not history.counted:  # or compacted since its last turn: what is sent is rendered anew
        taken = await take(
            room.store,
            room.fleet,
            room.models,
            session,
            policy(session),
            default_max_tokens=room.default_max_tokens,
        )
        if taken is not None and (model := other or taken.model) is not None:
            return await rendered(replace(taken, model=model), taken.history.view)
    return await history.head.load_ids()
