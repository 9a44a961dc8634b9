"""A turn's prompt, made to fit: where the window would be full, the session is compacted before the turn begins."""

from __future__ import annotations

from compression.budget import answer_reserve, least_answer
from gateway.errors import ContextTooLong
from gateway.sessions.command import TurnCommand
from gateway.sessions.compaction import Idle
from gateway.sessions.history import History, load
from gateway.sessions.prepare import Prepared, prepare
from gateway.sessions.room import TurnRoom
from gateway.store.compaction_records import CompactionRecord


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
        if history.session is None:
            raise
        found = await _room_made(room, history, _asked(error))
        if not isinstance(found, CompactionRecord):
            error.details |= {"compaction": _why(found)}
            raise
        made = found
    else:
        if history.session is None or not _tight(room, command, prepared):
            return history, prepared, None
        found = await _room_made(room, history, prepared.prompt_tokens)
        if not isinstance(found, CompactionRecord):
            return history, prepared, None
        made = found
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
    return prepared.prompt_tokens + least_answer(prepared.window, reserve) > prepared.window


async def _room_made(room: TurnRoom, history: History, prompt_tokens: int) -> CompactionRecord | Idle:
    """Idle: the session's policy forbids it, or it brought nothing; the turn is refused, or takes what is left."""
    session = history.session
    assert session is not None
    policy = room.compactions.policy(session)
    if policy.on_overflow == "error" or (policy.strategy == "off" and policy.on_overflow != "truncate"):
        return Idle("the session's policy forbids it")
    made = await room.compactions.make_room(
        session,
        incoming_tokens=max(0, prompt_tokens - history.used_tokens),
        parent=history.head.turn_id,
        truncate=policy.on_overflow == "truncate",
    )
    if isinstance(made, Idle) or made.status == "committed":
        return made
    return Idle(str((made.error or {}).get("message", "it failed")))


def _why(idle: Idle) -> dict[str, object]:
    """What compaction could not do, for the details of the refusal."""
    if idle.plan is None:
        return {"reason": idle.reason}
    return {
        "reason": idle.reason,
        "tokens_after": idle.plan.tokens_after,
        "allowed_tokens": idle.plan.allowed_tokens,
    }
