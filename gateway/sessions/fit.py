"""A turn's prompt, made to fit: where the window would be full, the session is compacted before the turn begins."""

from __future__ import annotations

from compression.budget import answer_reserve
from gateway.errors import ContextTooLong
from gateway.sessions.command import TurnCommand
from gateway.sessions.compaction import Idle
from gateway.sessions.history import History, load
from gateway.sessions.prepare import Prepared, prepare
from gateway.sessions.room import TurnRoom
from gateway.store.compaction_records import CompactionRecord

LEAST_ANSWER = 16  # an answer shall have a sixteenth of the window at least, or all that it may have


async def prepared_for(room: TurnRoom, command: TurnCommand, history: History, name: str | None) -> Prepared:
    return await prepare(
        command.ask,
        history,
        fleet=room.fleet,
        models=room.models,
        session_name=name,
        default_max_tokens=room.max_output_tokens,
        param=command.param,
    )


async def fitting(
    room: TurnRoom, command: TurnCommand, history: History, name: str | None
) -> tuple[History, Prepared, CompactionRecord | None]:
    """The turn as it can go out, and the compaction that made room for it. Raises as `prepare` does."""
    try:
        prepared = await prepared_for(room, command, history, name)
    except ContextTooLong as error:
        if history.session is None or (made := await _room_made(room, command, history, _asked(error))) is None:
            raise
    else:
        if history.session is None or not _tight(room, command, prepared):
            return history, prepared, None
        made = await _room_made(room, command, history, prepared.prompt_tokens)
        if made is None:
            return history, prepared, None
    session = await room.store.get_session(command.tenant_id, history.session.id)
    again = await load(room.store, session or history.session, history.head.turn_id)
    return again, await prepared_for(room, command, again, name), made


def _asked(error: ContextTooLong) -> int:
    prompt_tokens = error.details.get("prompt_tokens")
    return prompt_tokens if isinstance(prompt_tokens, int) else 0


def _tight(room: TurnRoom, command: TurnCommand, prepared: Prepared) -> bool:
    """It would fit, with hardly any room for an answer."""
    if prepared.window is None:
        return False
    reserve = answer_reserve(prepared.window, command.ask.shape.max_tokens, room.max_output_tokens)
    return prepared.prompt_tokens + min(reserve, prepared.window // LEAST_ANSWER) > prepared.window


async def _room_made(
    room: TurnRoom, command: TurnCommand, history: History, prompt_tokens: int
) -> CompactionRecord | None:
    """None: the session's policy forbids it, or it brought nothing; then the turn is refused, or takes what is left."""
    session = history.session
    assert session is not None
    policy = room.compactions.policy(session)
    if policy.on_overflow == "error" or (policy.strategy == "off" and policy.on_overflow != "truncate"):
        return None
    made = await room.compactions.make_room(
        session,
        incoming_tokens=max(0, prompt_tokens - history.used_tokens),
        parent=history.head.turn_id,
        truncate=policy.on_overflow == "truncate",
    )
    return None if isinstance(made, Idle) or made.status != "committed" else made
