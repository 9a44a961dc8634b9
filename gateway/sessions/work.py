"""One turn's work, from transaction 1 to its terminal event: stream, fail over before the first delta, transaction 2.

Runs in a task of its own. What goes wrong here is the turn's last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import structlog

from engines.contract import ChatPrompt, EngineError, EngineLost, EngineUnreachable, GenerateRequest
from gateway.errors import BadRequest, ContextTooLong, GatewayError
from gateway.fleet.placement import Placement
from gateway.sessions.answer import AnswerParser
from gateway.sessions.command import TurnCommand
from gateway.sessions.events import EventLog
from gateway.sessions.failures import from_engine
from gateway.sessions.fit import recovered
from gateway.sessions.heads import made_with, standing
from gateway.sessions.history import History
from gateway.sessions.outcome import Outcome, as_failure, finish_turn, outcome
from gateway.sessions.prepare import Prepared, place
from gateway.sessions.reader import AnswerReader
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import TurnEnded, TurnRun
from gateway.store.records import Begun, FinishTurn, LeaseLost, StoreUnavailable

log = structlog.get_logger(__name__)

COMMIT_RETRY_S = (0.1, 0.3, 1.0, 2.0, 4.0)  # a database that went away gets this long to take the answer


def _parser(command: TurnCommand, prepared: Prepared) -> AnswerParser | None:
    """None where the engine's own text is the answer: by chat, and for families that write nothing but content."""
    if prepared.tokens is None or prepared.format is None or isinstance(prepared.prompt, ChatPrompt):
        return None
    tools = () if command.ask.tool_choice == "none" else command.ask.tools
    if prepared.format.kind == "plain" and not prepared.format.reasoning:
        return None
    return AnswerParser(prepared.tokens, prompt=prepared.prompt.delta, tools=tools, format=prepared.format)


class TurnWork:
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
        self.made = begun is not None and begun.made
        self.placement = prepared.placement
        self.reader = AnswerReader(_parser(command, prepared), room.new_id)
        self.error: GatewayError | None = None
        self.recovered = False  # the engine found the prompt too long, and a compaction made it fit

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
            self.run.emit(await self._finish())
            self._consider_compaction()
        except Exception as error:
            self.run.failure = as_failure(error)
            self.run.emit(self._ended(outcome(self.run, self.reader, self.run.failure), {}))
            raise
        finally:
            if log is not None:
                await log.close()
        if bug is not None:
            raise bug

    async def _generate(self) -> None:
        """Stream until the end, a failure (kept in `error`) or a cancel; once more where the engine had less room."""
        await self._pumped()
        if isinstance(self.error, ContextTooLong) and not self.reader.started and self.run.cancel_reason is None:
            fit = await recovered(self.room, self.command, self.history, self.prepared, self.error)
            if fit is not None:
                self.history, self.prepared = fit
                self.placement, self.error, self.run.failure = self.prepared.placement, None, None
                self.recovered = True
                await self._pumped()

    async def _pumped(self) -> None:
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
        """Where the session stands now, for its next turn."""
        heads, session, now = self.room.registry.heads, self.history.session, self.room.clock()
        if session is None and self.made and self.command.create is not None:
            session = made_with(self.command.create, now)
        if session is None or not write.move_head or self.seq is None:
            heads.forget(write.tenant_id, write.session_id)
            return
        parent_id = self.history.head.turn_id
        view = self.history.standing
        heads.put(standing(session, self.command, write, parent_id=parent_id, seq=self.seq, now=now, view=view))

    def _consider_compaction(self) -> None:
        """The turn is told; now there is time to make room for those to come."""
        known = self.room.registry.heads.get(self.command.tenant_id, self.command.session_id or "")
        if known is None or known.last.turn.id != self.run.turn_id:
            return
        if self._approximate:
            self.room.compactions.make_exact(known.session)
        used = History(last=known.last).used_tokens
        self.room.compactions.after_turn(known.session, used_tokens=used, window=self.prepared.window)

    def notes(self) -> dict[str, Any]:
        """How the turn went out."""
        return {
            **self.command.metadata,
            "mode": self.prepared.mode,
            "window": self.prepared.window,
            "max_tokens": self.prepared.sampling.max_tokens,
            **({"approximate": True} if self._approximate else {}),
            **({"context_recovered": True} if self.recovered else {}),
        }

    @property
    def _approximate(self) -> bool:
        return self.reader.usage is not None and self.reader.usage.approximate

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
        told = {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_tokens": used.cached_tokens if used is not None else None,
        }
        return {**told, "shifted_tokens": used.shifted_tokens} if used is not None and used.approximate else told
