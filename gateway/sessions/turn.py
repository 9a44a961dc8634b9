"""The one use case: begin a turn.

    start    read the head, build the prompt, refuse what cannot fit, transaction 1      -> TurnRun (a log of events)
    then     `TurnWork` in a task of its own: a reader that leaves takes nothing with it

`start` raises GatewayError while nothing is saved; after it, what goes wrong is the last event.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from gateway.errors import Conflict, NotFound, SessionBusy, ShuttingDown, Unprocessable
from gateway.limits.admission import Admission
from gateway.sessions.command import TurnCommand
from gateway.sessions.compaction_events import as_begun
from gateway.sessions.fit import fitting, prepared_for
from gateway.sessions.history import History, after_turn, load
from gateway.sessions.items import check_pairs
from gateway.sessions.prepare import Prepared
from gateway.sessions.replay import replayed
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import Compacted, HandedOver, TurnRun, TurnStarted
from gateway.sessions.unsaved import UNSAVED, can_go_without, marked, without_database
from gateway.sessions.work import TurnWork
from gateway.store.compaction_records import CompactionRecord
from gateway.store.records import (
    HEAD,
    BeginTurn,
    Begun,
    Busy,
    HeadMoved,
    Known,
    NoSession,
    SessionRecord,
    StoreUnavailable,
    TooManySessions,
    TurnRecord,
)

FOLLOW_S = 0.15  # how often the store is asked whether another gateway's turn has ended
LEAST_WAIT_S = 0.01  # that a wait for a session is counted as
HEAD_TRIES = 5  # a head that moves between reading and transaction 1 is read again this often


async def start(room: TurnRoom, command: TurnCommand) -> TurnRun:
    """Begin a turn, or find the one that its idempotency key names. Raises GatewayError; nothing is saved then."""
    if room.registry.stopping:
        raise ShuttingDown()
    if command.session_id is None or not command.saved:
        return await _start_stateless(room, command)
    if not can_go_without(room, command):
        return await _start_kept(room, command)
    if not room.store.away:
        try:
            return await _start_kept(room, command)
        except StoreUnavailable:
            pass  # it went away just now
    return await _start_stateless(room, without_database(command))


async def _start_kept(room: TurnRoom, command: TurnCommand) -> TurnRun:
    known = await _known(room, command)
    tries = 0
    while tries < HEAD_TRIES:
        tries += 1
        if known is not None and (run := await _attach(room, command, known)) is not None:
            return run
        history = await _history(room, command, known)
        if command.again is not None and command.follows not in (None, history.head.turn_id):
            command = await command.again()  # another turn came in between
            continue
        check_taken(history.session)
        command = _current(command, history)
        assert command.session_id is not None
        check_pairs(history.open_calls, command.ask.kept, param=command.param)
        name = room.session_name(command.tenant_id, command.session_id)
        history, prepared, made = await fitting(room, command, history, name)
        command = _noted(command, made)
        assert command.session_id is not None
        # once it is asked for, the turn begins and runs, whether or not the client is there to hear of it
        outcome_ = await room.registry.see_through(_begun(room, command, history, prepared, made), _left_alone)
        if isinstance(outcome_, TurnRun):
            return outcome_
        if isinstance(outcome_, Busy):
            if command.busy_is_stateless:
                return await _start_stateless(room, marked(command, "session_busy"))
            if command.waits_s > 0:
                command = replace(command, waits_s=command.waits_s - await _until_free(room, command))
                tries -= 1
                continue
            raise SessionBusy(
                "this session is answering another turn; send the next one when it is done",
                retry_after_s=max(1.0, round(outcome_.retry_after_s)),
            )
        if isinstance(outcome_, Known):
            known = outcome_.turn
            continue
        assert command.session_id is not None
        remembered = room.registry.heads.forget(command.tenant_id, command.session_id)
        if isinstance(outcome_, NoSession) and not remembered:
            raise NotFound(f"no session {command.session_id[:64]!r}", code="session_not_found")
        if command.again is not None:
            command = await command.again()
    raise SessionBusy("other turns keep moving this session's head; try again", retry_after_s=1.0)


def check_taken(session: SessionRecord | None) -> None:
    """Raises Conflict for a session that takes no turns."""
    if session is not None and session.archived_at is not None:
        raise Conflict(
            "this session is archived and takes no turns: POST /v1/sessions/{session_id}/unarchive takes it up again",
            code="session_archived",
        )


async def _until_free(room: TurnRoom, command: TurnCommand) -> float:
    """Waits for the turn that the session answers now, here or at another gateway -> seconds waited, more than none."""
    assert command.session_id is not None
    began, tenant, session_id = time.monotonic(), command.tenant_id, command.session_id
    run = room.registry.of_session(tenant, session_id)
    with suppress(TimeoutError, HandedOver):
        async with asyncio.timeout(command.waits_s):
            if run is not None:
                await run.wait_end()
            while True:
                session = await room.store.get_session(tenant, session_id)
                if session is None or session.status == "idle":
                    break
                await asyncio.sleep(FOLLOW_S)
    if room.registry.stopping:
        raise ShuttingDown()
    return max(time.monotonic() - began, LEAST_WAIT_S)


async def _begun(
    room: TurnRoom, command: TurnCommand, history: History, prepared: Prepared, made: CompactionRecord | None
) -> TurnRun | Busy | HeadMoved | Known | NoSession:
    """Transaction 1, for a turn that its tenant's limits let through."""
    held = await _admitted(room, command, prepared)
    try:
        outcome_ = await room.store.begin_turn(_begin(room, command, history))
        if not isinstance(outcome_, Begun):
            return outcome_
        run = _launch(room, command, history, prepared, outcome_, made, held)
        held = None
        return run
    except TooManySessions as error:
        raise room.gate.no_session(error) from error
    finally:
        room.gate.give_back(held)


async def _admitted(room: TurnRoom, command: TurnCommand, prepared: Prepared) -> Admission | None:
    """It may use its prompt and the longest answer. Raises RateLimited, Forbidden, Unavailable."""
    tokens = prepared.prompt_tokens + prepared.sampling.max_tokens
    return await room.gate.admit(command.tenant_id, command.key_id, tokens, command.told)


def _noted(command: TurnCommand, made: CompactionRecord | None) -> TurnCommand:
    """The turn's metadata says that a compaction made room for it."""
    if made is None:
        return command
    numbers = {name: made.report.get(name) for name in ("tokens_before", "tokens_after")}
    return replace(command, metadata={**command.metadata, "compaction": {"id": made.id, **numbers}})


def _left_alone(outcome_: TurnRun | Busy | HeadMoved | Known | NoSession) -> None:
    if isinstance(outcome_, TurnRun):
        outcome_.left_alone()


def _current(command: TurnCommand, history: History) -> TurnCommand:
    """The command as the session asks for it now: a PATCH may have come since the request was read."""
    session = history.session
    if session is None or command.ask_of is None or session.version == command.version:
        return command
    return replace(command, ask=command.ask_of(session), version=session.version)


async def _history(room: TurnRoom, command: TurnCommand, again: TurnRecord | None = None) -> History:
    """What the turn goes on from. One that runs `again` starts at its own parent, though its partial answer is head."""
    assert command.session_id is not None
    known = room.registry.heads.get(command.tenant_id, command.session_id) if again is None else None
    if known is not None and command.parent in (HEAD, known.last.turn.id):
        return after_turn(room.store, known.session, known.last, known.view)
    session = await room.store.get_session(command.tenant_id, command.session_id)
    if session is not None:
        own = again is not None and command.parent == HEAD and session.head_turn_id == again.turn.id
        return await load(room.store, session, again.turn.parent_id if own and again else command.parent)
    if command.create is None:
        raise NotFound(f"no session {command.session_id[:64]!r}", code="session_not_found")
    return History()


def _begin(room: TurnRoom, command: TurnCommand, history: History) -> BeginTurn:
    assert command.session_id is not None
    session = history.session
    return BeginTurn(
        tenant_id=command.tenant_id,
        session_id=command.session_id,
        turn_id=room.new_id("turn"),
        owner=room.registry.owner,
        lease_s=room.lease_s,
        input=command.ask.kept,
        model=command.ask.model,
        parent=command.parent,
        expected_head=history.head.turn_id,
        expected_version=session.version if session is not None else None,
        expected_view=session.view_version if session is not None else None,
        idempotency_key=command.idempotency_key,
        request_hash=command.request_hash,
        on_disconnect=command.on_disconnect,
        create=command.create if session is None else None,
        user_ref=command.user_ref,
        move_head=command.move_head,
        metadata=command.metadata,
        key_id=command.key_id,
    )


async def _known(room: TurnRoom, command: TurnCommand) -> TurnRecord | None:
    if command.idempotency_key is None:
        return None
    assert command.session_id is not None
    return await room.store.find_idempotent(command.tenant_id, command.session_id, command.idempotency_key)


def reopenable(record: TurnRecord) -> bool:
    """It never gave an answer that a client could have seen as done: failed, or cut off by its gateway's end."""
    status = record.turn.status
    return status == "failed" or (status == "incomplete" and record.finish_reason is None)


async def _attach(room: TurnRoom, command: TurnCommand, record: TurnRecord) -> TurnRun | None:
    """The turn of this idempotency key, to be followed where it runs here, waited for where another gateway runs it.

    None: it gave no answer (it failed, or its gateway is gone) and runs again. Raises Unprocessable, NotFound.
    """
    if record.request_hash != command.request_hash:
        raise Unprocessable(
            "this Idempotency-Key was used with another request body",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )
    tenant, session_id, turn_id = record.tenant_id, record.session_id, record.turn.id
    while record.turn.status == "in_progress":
        run = room.registry.find(tenant, turn_id, record.fence)
        if run is not None and run.ended is None:
            return run
        session = await room.store.get_session(tenant, session_id)
        found = await room.store.get_turn(tenant, session_id, turn_id)  # after the session: an end is seen whole
        if session is None or found is None:
            raise NotFound("the session was deleted while its turn ran", code="session_not_found")
        record = found
        if record.turn.status == "in_progress":
            if session.status == "idle":
                return None  # its lease is over: whoever ran it is gone
            await asyncio.sleep(FOLLOW_S)
    return None if reopenable(record) else room.registry.find(tenant, turn_id, record.fence) or replayed(record)


async def _start_stateless(room: TurnRoom, command: TurnCommand) -> TurnRun:
    unsaved = replace(command, session_id=None, create=None)
    history = History()
    if command.session_id is not None and command.parent is not None:
        history = await _history(room, command)
    else:
        check_pairs({}, command.ask.kept, param=command.param)
    prepared = await prepared_for(room, unsaved, history, None)
    held = None
    if room.gate.limits_of(command.tenant_id, command.key_id):
        held = await room.registry.see_through(_admitted(room, command, prepared), room.gate.give_back)
    return _launch(room, unsaved, history, prepared, None, None, held)


def _launch(
    room: TurnRoom,
    command: TurnCommand,
    history: History,
    prepared: Prepared,
    begun: Begun | None,
    made: CompactionRecord | None,
    held: Admission | None,
) -> TurnRun:
    run = TurnRun(
        begun.turn_id if begun is not None else room.new_id("turn"),
        tenant_id=command.tenant_id,
        session_id=command.session_id,
        on_disconnect=command.on_disconnect,
    )
    run.unsaved = command.metadata.get(UNSAVED)
    run.fence = begun.fence if begun is not None else 0
    work = TurnWork(room, command, history, prepared, run, begun, held)
    run.emit(
        TurnStarted(
            run.turn_id, run.session_id, work.seq, command.ask.model, room.clock(), work.metadata(prepared.placement)
        )
    )
    if made is not None:
        run.emit(Compacted("started", as_begun(made)))
        run.emit(Compacted("completed", made))
    room.registry.add(run, asyncio.create_task(work.run_to_end(), name=f"turn-{run.turn_id}"))
    return run
