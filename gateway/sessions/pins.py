"""Pins a turn, where pinned turns leave the conversation room: on every path that holds it, however it is shown now.

A tree that comes with its pins, by an import, is held to the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from compression.conversation import Turn, open_calls
from compression.view import RAW, held
from gateway.errors import Conflict, SessionBusy
from gateway.sessions.command import Ask
from gateway.sessions.history import History
from gateway.sessions.room import TurnRoom
from gateway.sessions.shown import shown
from gateway.sessions.sizing import Sizes, around, counter, sizes
from gateway.sessions.snapshot import Snapshot, take
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.windows import window_of
from gateway.store.compaction_records import ViewMoved
from gateway.store.records import HEAD, SessionRecord, TurnRecord

SHARE = 0.5  # of the window: system prompt, tools and pinned turns may take so much
TRIES = 50  # of pins that meet others: each time, one of them is through


async def pinned(room: TurnRoom, session: SessionRecord, turn_id: str) -> TurnRecord | None:
    """The turn, pinned. None: it is gone. Raises Conflict (pin_budget) with the numbers, SessionBusy.

    What was counted is what is pinned upon: where another pin came between, it is counted anew.
    """
    current: SessionRecord | None = session
    for _ in range(TRIES):
        if current is None:
            return None
        async for taken in _paths(room, current, turn_id):
            needed, limit = await asyncio.to_thread(_needed, taken, turn_id), int(SHARE * taken.window)
            if needed > limit:
                raise _over(needed, limit)
        try:
            return await room.store.pin_turn(
                session.tenant_id, session.id, turn_id, True, expected_view=current.view_version
            )
        except ViewMoved:
            current = await room.store.get_session(session.tenant_id, session.id)
    raise SessionBusy("what the session shows keeps changing", retry_after_s=1.0)


def _over(needed: int, limit: int, where: str = "") -> Conflict:
    return Conflict(
        f"system prompt, tools and pinned turns would take {needed} tokens{where}; {limit} are the most, half the "
        "window",
        code="pin_budget",
        details={"requested": needed, "limit": limit},
    )


async def check_pinned(room: TurnRoom, ask: Ask, turns: Sequence[Turn], pinned: frozenset[str]) -> None:
    """Of a new session that `ask` describes: `turns`, parents before children, of which some come pinned.

    Raises Conflict (pin_budget) with the numbers of the path that needs most, BadRequest. Where nobody knows the
    window, pins are as free as they are one by one.
    """
    window = window_of(ask.model, room.fleet, room.models)
    if window is None or not pinned:
        return
    standing = await shown(room.models.tokens(ask.model), ask, History())
    needed, end = await asyncio.to_thread(most_pinned, turns, pinned, standing.model)
    needed, limit = needed + standing.tokens, int(SHARE * window)
    if needed > limit:
        raise _over(needed, limit, f" on the path to {end[:64]!r}")


def most_pinned(turns: Sequence[Turn], pinned: frozenset[str], model: ModelTokens | None) -> tuple[int, str]:
    """(tokens that stand whole on a path, its last turn), of the path with most.

    before | unit of calls and outputs that the turn ends         a unit stands whole where one of it is pinned
    """
    waiting = {turn.id for turn in turns if open_calls(turn.items)}
    counted = [t for t in turns if t.id in pinned or t.id in waiting or t.parent_id in waiting]
    tokens = {turn.id: turn.tokens for turn in _raw(counted, model).turns}
    at: dict[str | None, tuple[int, int, bool]] = {None: (0, 0, False)}  # before, unit, whether it stands whole
    most = (0, "")
    for turn in turns:
        before, unit, stands = at[turn.parent_id]
        if turn.parent_id not in waiting:
            before, unit, stands = before + (unit if stands else 0), 0, False
        unit, stands = unit + tokens.get(turn.id, 0), stands or turn.id in pinned
        at[turn.id] = before, unit, stands
        most = max(most, (before + (unit if stands else 0), turn.id))
    return most


async def _paths(room: TurnRoom, session: SessionRecord, turn_id: str) -> AsyncIterator[Snapshot]:
    """The paths that hold the turn: to the head, to itself, to turns below it on a branch that are pinned. None where
    nobody knows the window."""
    taken = await _path(room, session, HEAD) or await _path(room, session, turn_id)
    if taken is None:
        return
    seen: set[str] = set()
    for end in (None, turn_id, *sorted(taken.pinned)):
        if end in seen or (end is not None and (taken := await _path(room, session, end)) is None):
            continue
        assert taken is not None
        ids = {turn.id for turn in taken.turns}
        if turn_id in ids:
            seen |= ids
            yield taken


async def _path(room: TurnRoom, session: SessionRecord, end: str) -> Snapshot | None:
    return await take(
        room.store,
        room.fleet,
        room.models,
        session,
        room.compactions.policy(session),
        default_max_tokens=room.max_output_tokens,
        parent=end,
    )


def _needed(taken: Snapshot, turn_id: str) -> int:
    """Tokens of what stands whole with the turn pinned, as they are without a summary or a cut; calls of pinned outputs
    stand with them."""
    waiting = {turn.id for turn in taken.turns if open_calls(turn.items)}
    whole = held([turn.id for turn in taken.turns], taken.pinned | {turn_id}, waiting)
    raw = _raw([turn for turn in taken.turns if turn.id in whole], taken.model)
    return taken.sizes.overhead_tokens + sum(turn.tokens for turn in raw.turns)


def _raw(turns: Sequence[Turn], model: ModelTokens | None) -> Sizes:
    return sizes(turns, RAW, frozenset(), prompt_tokens=0, count=counter(model), around=around(model))
