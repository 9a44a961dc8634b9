"""A turn's prompt, made to fit: where the window would be full, the session is compacted before the turn begins."""

from __future__ import annotations

from gateway.errors import ContextTooLong
from gateway.fleet.placement import Placement
from gateway.sessions.command import TurnCommand
from gateway.sessions.compaction import Idle
from gateway.sessions.demands import has_room
from gateway.sessions.failures import numbers_of
from gateway.sessions.history import History, load
from gateway.sessions.homes import known
from gateway.sessions.prepare import Prepared, prepare
from gateway.sessions.room import TurnRoom
from gateway.store.compaction_records import CompactionRecord

TRIES = 3  # a run that was under way may have brought too little, and what is shown may have changed meanwhile


async def prepared_for(
    room: TurnRoom, command: TurnCommand, history: History, name: str | None, placement: Placement | None = None
) -> Prepared:
    if placement is None:
        await known(history, room.fleet)
    return await prepare(
        command.ask,
        history,
        fleet=room.fleet,
        models=room.models,
        session_name=name,
        default_max_tokens=room.max_output_tokens,
        param=command.param,
        tenant_id=command.tenant_id,
        salt=room.cache_salt(command.tenant_id),
        placement=placement,
    )


async def fitting(
    room: TurnRoom, command: TurnCommand, history: History, name: str | None
) -> tuple[History, Prepared, CompactionRecord | None]:
    """The turn as it can go out, and the compaction that made room for it. Raises as `prepare` does."""
    made: CompactionRecord | None = None
    for _ in range(TRIES):
        tried = await _tried(room, command, history, name)
        if isinstance(tried, Prepared) and (history.session is None or not _tight(room, command, tried)):
            return history, tried, made
        if isinstance(tried, ContextTooLong) and history.session is None:
            raise tried
        found = await _room_made(room, command, history, *_asked(tried))
        if isinstance(found, CompactionRecord):
            made = found
        elif not found.again:
            if isinstance(tried, Prepared):
                return history, tried, made
            tried.details |= {"compaction": _why(found)}
            raise tried
        history = await _seen_anew(room, history)
    return history, await prepared_for(room, command, history, name), made


async def _tried(room: TurnRoom, command: TurnCommand, history: History, name: str | None) -> Prepared | ContextTooLong:
    try:
        return await prepared_for(room, command, history, name)
    except ContextTooLong as error:
        return error


async def recovered(
    room: TurnRoom, command: TurnCommand, history: History, prepared: Prepared, error: ContextTooLong
) -> tuple[History, Prepared] | None:
    """A turn that its engine found too long, made to fit by what the refusal measured. None: nothing more to do.

    Where tokens were estimated, the window is scaled by how far the estimate was off.
    """
    limit, requested = error.details.get("limit"), error.details.get("requested") or prepared.prompt_tokens
    if history.session is None or not isinstance(limit, int) or not isinstance(requested, int) or requested <= 0:
        return None
    asked = command.ask.shape.max_tokens or 0
    measured = max(1, requested - (asked if requested - asked >= prepared.prompt_tokens else 0))
    window = int(limit * min(1.0, prepared.prompt_tokens / measured))
    made = await _room_made(room, command, history, prepared.prompt_tokens, window=window)
    if not isinstance(made, CompactionRecord):
        error.details |= {"compaction": _why(made)}
        return None
    again = await _seen_anew(room, history)
    name = room.session_name(command.tenant_id, history.session.id)
    return again, await prepared_for(room, command, again, name)


async def _seen_anew(room: TurnRoom, history: History) -> History:
    assert history.session is not None
    session = await room.store.get_session(history.session.tenant_id, history.session.id)
    return await load(room.store, session or history.session, history.head.turn_id)


def _asked(tried: Prepared | ContextTooLong) -> tuple[int, int | None]:
    """Tokens of the prompt, and the window that it would not fit: of the replicas that are left, perhaps a smaller one
    than the session's own."""
    return (tried.prompt_tokens, tried.window) if isinstance(tried, Prepared) else numbers_of(tried)


def _tight(room: TurnRoom, command: TurnCommand, prepared: Prepared) -> bool:
    """It would fit, with hardly any room for an answer."""
    asked = command.ask.shape.max_tokens
    return not has_room(prepared.window, prepared.prompt_tokens, asked, room.max_output_tokens)


async def _room_made(
    room: TurnRoom, command: TurnCommand, history: History, prompt_tokens: int, window: int | None = None
) -> CompactionRecord | Idle:
    """Idle: the session's policy, or the request, forbids it, or it brought nothing; the turn is refused, or takes what
    is left."""
    session = history.session
    assert session is not None
    policy = room.compactions.policy(session)
    on_overflow = command.on_overflow or policy.on_overflow
    if on_overflow == "error" or (policy.strategy == "off" and on_overflow != "truncate"):
        who = "request" if command.on_overflow == "error" else "session's policy"
        return Idle("policy", f"the {who} forbids it")
    made = await room.compactions.make_room(
        session,
        prompt_tokens=prompt_tokens,
        parent=history.head.turn_id,
        truncate=on_overflow == "truncate",
        window=window,
    )
    if isinstance(made, Idle) or made.status == "committed":
        return made
    why = made.error or {}
    return Idle(str(why.get("code", "failed")), str(why.get("message", "it failed")))


def _why(idle: Idle) -> dict[str, object]:
    """What compaction could not do, for the details of the refusal."""
    if idle.plan is None:
        return {"reason": idle.reason, "message": idle.message}
    return {
        "reason": idle.reason,
        "tokens_after": idle.plan.tokens_after,
        "allowed_tokens": idle.plan.allowed_tokens,
    }
