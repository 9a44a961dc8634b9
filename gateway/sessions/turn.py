"""The one use case: run a turn.

    start    read the head, build the prompt, refuse what cannot fit, transaction 1      -> TurnRun (a log of events)
    then     stream, fail over before the first delta, transaction 2, TurnEnded

`start` raises GatewayError while nothing is saved; after it, what goes wrong is the last event. The turn runs in a
task of its own: a reader that leaves takes nothing with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import structlog

from engines.contract import ChatPrompt, EngineError, EngineLost, EngineUnreachable, GenerateRequest
from gateway.errors import BadRequest, GatewayError, NotFound, SessionBusy, Unprocessable
from gateway.fleet.fleet import Fleet
from gateway.fleet.placement import Placement
from gateway.sessions.answer import AnswerParser
from gateway.sessions.command import TurnCommand
from gateway.sessions.events import EventLog
from gateway.sessions.failures import from_engine
from gateway.sessions.heads import standing
from gateway.sessions.history import History, after_turn, load
from gateway.sessions.items import check_pairs
from gateway.sessions.models import Models
from gateway.sessions.outcome import Outcome, as_failure, finish_turn, outcome
from gateway.sessions.prepare import Prepared, place, prepare
from gateway.sessions.reader import AnswerReader
from gateway.sessions.registry import Registry
from gateway.sessions.replay import replayed
from gateway.sessions.run import TurnEnded, TurnRun, TurnStarted
from gateway.store.records import (
    HEAD,
    BeginTurn,
    Begun,
    Busy,
    FinishTurn,
    HeadMoved,
    Known,
    LeaseLost,
    NoSession,
    StoreUnavailable,
    TurnRecord,
)
from gateway.store.sessions import Store

FOLLOW_S = 0.15  # how often the store is asked whether another gateway's turn has ended
log = structlog.get_logger(__name__)

HEAD_TRIES = 5  # a head that moves between reading and transaction 1 is read again this often
COMMIT_RETRY_S = (0.1, 0.3, 1.0, 2.0, 4.0)  # a database that went away gets this long to take the answer


@dataclass(frozen=True, slots=True)
class TurnRoom:
    """What a turn needs of the gateway, wired once."""

    store: Store
    fleet: Fleet
    models: Models
    registry: Registry
    clock: Callable[[], float]  # seconds since 1970
    new_id: Callable[[str], str]  # "turn" -> "turn_…"
    session_name: Callable[[str, str], str]  # (tenant, session) -> the name towards replicas
    cache_salt: Callable[[str], str]  # tenant -> salt
    lease_s: float
    max_output_tokens: int


async def start(room: TurnRoom, command: TurnCommand) -> TurnRun:
    """Begin a turn, or find the one that its idempotency key names. Raises GatewayError; nothing is saved then."""
    if command.session_id is None:
        return await _start_stateless(room, command)
    known = await _known(room, command)
    for _ in range(HEAD_TRIES):
        if known is not None and (run := await _attach(room, command, known)) is not None:
            return run
        history = await _history(room, command, known)
        if command.again is not None and command.follows not in (None, history.head.turn_id):
            command = await command.again()  # another turn came in between
            continue
        command = _current(command, history)
        assert command.session_id is not None
        check_pairs(history.open_calls, command.ask.kept, param=command.param)
        name = room.session_name(command.tenant_id, command.session_id)
        prepared = await _prepare(room, command, history, name)
        # once it is asked for, the turn begins and runs, whether or not the client is there to hear of it
        outcome_ = await room.registry.see_through(_begun(room, command, history, prepared), _left_alone)
        if isinstance(outcome_, TurnRun):
            return outcome_
        if isinstance(outcome_, Busy):
            if command.busy_is_stateless:
                return await _start_stateless(room, replace(command, metadata={**command.metadata, "saved": False}))
            raise SessionBusy(
                "this session is answering another turn; send the next one when it is done",
                retry_after_s=max(1.0, round(outcome_.retry_after_s)),
            )
        if isinstance(outcome_, Known):
            known = outcome_.turn
            continue
        remembered = room.registry.heads.forget(command.tenant_id, command.session_id)
        if isinstance(outcome_, NoSession) and not remembered:
            raise NotFound(f"no session {command.session_id[:64]!r}", code="session_not_found")
        if command.again is not None:
            command = await command.again()
    raise SessionBusy("other turns keep moving this session's head; try again", retry_after_s=1.0)


async def _begun(
    room: TurnRoom, command: TurnCommand, history: History, prepared: Prepared
) -> TurnRun | Busy | HeadMoved | Known | NoSession:
    outcome_ = await room.store.begin_turn(_begin(room, command, history))
    return _launch(room, command, history, prepared, outcome_) if isinstance(outcome_, Begun) else outcome_


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
        return after_turn(room.store, known.session, known.last)
    session = await room.store.get_session(command.tenant_id, command.session_id)
    if session is not None:
        own = again is not None and command.parent == HEAD and session.head_turn_id == again.turn.id
        return await load(room.store, session, again.turn.parent_id if own and again else command.parent)
    if command.create is None:
        raise NotFound(f"no session {command.session_id[:64]!r}", code="session_not_found")
    return History()


async def _prepare(room: TurnRoom, command: TurnCommand, history: History, name: str | None) -> Prepared:
    return await prepare(
        command.ask,
        history,
        fleet=room.fleet,
        models=room.models,
        session_name=name,
        default_max_tokens=room.max_output_tokens,
        param=command.param,
    )


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
        idempotency_key=command.idempotency_key,
        request_hash=command.request_hash,
        on_disconnect=command.on_disconnect,
        create=command.create if session is None else None,
        move_head=command.move_head,
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
    prepared = await _prepare(room, unsaved, history, None)
    return _launch(room, unsaved, history, prepared, None)


def _launch(room: TurnRoom, command: TurnCommand, history: History, prepared: Prepared, begun: Begun | None) -> TurnRun:
    run = TurnRun(
        begun.turn_id if begun is not None else room.new_id("turn"),
        tenant_id=command.tenant_id,
        session_id=command.session_id,
        on_disconnect=command.on_disconnect,
    )
    run.fence = begun.fence if begun is not None else 0
    work = _Work(room, command, history, prepared, run, begun)
    run.emit(
        TurnStarted(
            run.turn_id, run.session_id, work.seq, command.ask.model, room.clock(), work.metadata(prepared.placement)
        )
    )
    room.registry.add(run, asyncio.create_task(work.run_to_end(), name=f"turn-{run.turn_id}"))
    return run


def _parser(command: TurnCommand, prepared: Prepared) -> AnswerParser | None:
    """None where the engine's own text is the answer: by chat, and for families that write nothing but content."""
    if prepared.tokens is None or prepared.format is None or isinstance(prepared.prompt, ChatPrompt):
        return None
    tools = () if command.ask.tool_choice == "none" else command.ask.tools
    if prepared.format.kind == "plain" and not prepared.format.reasoning:
        return None
    return AnswerParser(prepared.tokens, prompt=prepared.prompt.delta, tools=tools, format=prepared.format)


class _Work:
    """One turn from transaction 1 to its terminal event."""

    def __init__(
        self,
        room: TurnRoom,
        command: TurnCommand,
        history: History,
        prepared: Prepared,
        run: TurnRun,
        begun: Begun | None,
    ) -> None:
        self.room = room
        self.command = command
        self.history = history
        self.prepared = prepared
        self.run = run
        self.seq = begun.seq if begun is not None else None
        self.placement = prepared.placement
        self.reader = AnswerReader(_parser(command, prepared), room.new_id)
        self.error: GatewayError | None = None

    async def run_to_end(self) -> None:
        log = EventLog(self.room.store, self.run) if self.command.persist_events else None
        bug: Exception | None = None
        try:
            await self._generate()
        except Exception as error:  # noqa: BLE001 - the turn is stored as failed first, then it is raised
            bug, self.error = error, as_failure(error)
            self.run.failure = self.error
        try:
            if log is not None:
                await log.flush()
            ended = await self._finish()
        except Exception as error:
            self.run.failure = as_failure(error)
            ended = self._ended(outcome(self.run, self.reader, self.run.failure), {})
            self.run.emit(ended)
            raise
        self.run.emit(ended)
        if log is not None:
            await log.close()
        if bug is not None:
            raise bug

    async def _generate(self) -> None:
        """Stream until the end, a failure (kept in `error`) or a cancel."""
        pump = asyncio.create_task(self._pump(), name=f"pump-{self.run.turn_id}")
        self.run.on_cancel(pump.cancel)
        try:
            await pump
        except asyncio.CancelledError:
            if self.run.cancel_reason is None:
                pump.cancel()
                raise
        except EngineError as error:
            self.error = from_engine(error)
        except GatewayError as error:
            self.error = error
        self.run.failure = self.error
        if self.reader.finish is None:
            for piece in self.reader.flush():
                self.run.emit(piece)

    async def _pump(self) -> None:
        tried: list[str] = []
        while True:
            try:
                await self._stream(self.placement)
                return
            except EngineError as error:
                self._note_failure(self.placement, error)
                if not error.retryable or self.reader.started:
                    raise
                tried.append(self.placement.replica.name)
                try:
                    self.placement = place(self.command.ask.model, self.history, self.room.fleet, tried)
                except GatewayError:
                    raise error from None
                if not self._speaks_to(self.placement):
                    raise

    def _speaks_to(self, placement: Placement) -> bool:
        caps = placement.replica.capabilities
        if self.prepared.mode == "chat":
            return caps is not None and caps.takes_chat
        return self.room.models.by_ids(self.command.ask.model, placement.replica) is not None

    async def _stream(self, placement: Placement) -> None:
        replica = placement.replica
        request = GenerateRequest(
            request_id=self.run.turn_id,
            model=self.command.ask.model,
            prompt=self.prepared.prompt,
            sampling=self.prepared.sampling,
            cache_salt=self.room.cache_salt(self.command.tenant_id),
        )
        replica.in_flight += 1
        try:
            async with aclosing(replica.engine.generate(request)) as stream:
                async for delta in stream:
                    for piece in self.reader.push(delta):
                        self.run.emit(piece)
        finally:
            replica.in_flight -= 1
        if self.reader.finish is None:
            raise EngineLost("the stream ended without a finish", replica=replica.name)
        replica.answered()

    def _note_failure(self, placement: Placement, error: EngineError) -> None:
        if error.retryable or isinstance(error, EngineLost):
            lost = isinstance(error, EngineUnreachable | EngineLost)
            placement.replica.failed(error, self.room.fleet.now(), lost=lost)

    async def _finish(self) -> TurnEnded:
        """Transaction 2, tried again while the database is away; then the terminal event."""
        result = outcome(self.run, self.reader, self.error)
        metadata = self.metadata(self.placement)
        if self.command.session_id is None or result.code == "lease_lost":
            return self._ended(result, metadata)
        if isinstance(self.error, BadRequest) and not self.reader.started:
            return await self._refused(result, metadata)
        write = finish_turn(
            self.command, self.history, self.prepared, self.run, self.reader, result, self.placement, self.usage()
        )
        write = replace(write, metadata={**write.metadata, **self.notes()})
        for pause_s in (*COMMIT_RETRY_S, None):
            try:
                await self.room.store.finish_turn(write)
                self._remember(write)
                return self._ended(result, metadata)
            except LeaseLost:
                return self._ended(result.failed("lease_lost", "another gateway took this session over"), metadata)
            except StoreUnavailable as error:
                if pause_s is None:
                    return self._ended(result.failed("not_persisted", f"the answer could not be stored: {error}"), {})
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _refused(self, result: Outcome, metadata: Mapping[str, Any]) -> TurnEnded:
        """The engine does not take what was asked: as with any other wrong request, nothing of it stays."""
        assert self.command.session_id is not None
        try:
            await self.room.store.release_turn(
                self.command.tenant_id, self.command.session_id, self.run.turn_id, self.run.fence
            )
        except (LeaseLost, StoreUnavailable) as error:
            log.warning("a refused turn stays until its lease ends", turn_id=self.run.turn_id, reason=str(error))
        return self._ended(result, metadata)

    def _remember(self, write: FinishTurn) -> None:
        """Where the session stands now, for its next turn. A session that was made with this turn is read once."""
        heads, session = self.room.registry.heads, self.history.session
        if session is None or not write.move_head or self.seq is None:
            heads.forget(write.tenant_id, write.session_id)
            return
        parent_id, now = self.history.head.turn_id, self.room.clock()
        heads.put(standing(session, self.command, write, parent_id=parent_id, seq=self.seq, now=now))

    def notes(self) -> dict[str, Any]:
        """How the turn went out."""
        return {
            **self.command.metadata,
            "mode": self.prepared.mode,
            "window": self.prepared.window,
            "max_tokens": self.prepared.sampling.max_tokens,
        }

    def metadata(self, placement: Placement) -> dict[str, Any]:
        told = {**self.notes(), **placement.as_json()}
        if self.prepared.built is not None:
            told["prefix_report"] = self.prepared.built.report
        return told

    def _ended(self, result: Outcome, metadata: Mapping[str, Any]) -> TurnEnded:
        return TurnEnded(
            self.run.turn_id,
            self.run.session_id,
            self.seq,
            result.status,
            result.finish_reason,
            result.output,
            self.usage(),
            metadata,
            result.error,
        )

    def usage(self) -> dict[str, Any]:
        used = self.reader.usage
        prompt = used.prompt_tokens if used is not None else self.prepared.prompt_tokens
        output = used.output_tokens if used is not None else self.reader.num_ids
        return {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_tokens": used.cached_tokens if used is not None else None,
        }
