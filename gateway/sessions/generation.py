"""One answer on its way: from a replica's stream, over failures of replicas, to its end, an error or a cancel.

Knows neither what becomes of the turn nor the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from engines.contract import (
    ChatPrompt,
    Delta,
    EngineBroken,
    EngineError,
    EngineLost,
    EngineOverloaded,
    EngineTimeout,
    EngineUnreachable,
    GenerateRequest,
    IdsPrompt,
    RequestRefused,
    UnknownBase,
)
from gateway.errors import ContextTooLong, GatewayError
from gateway.fleet.blame import Blame
from gateway.fleet.outlook import Path
from gateway.fleet.placement import Placement
from gateway.sessions.answer import AnswerParser
from gateway.sessions.command import TurnCommand
from gateway.sessions.continuation import Continuation, may_go_on
from gateway.sessions.failover import Failover
from gateway.sessions.failures import broken_off, from_engine
from gateway.sessions.fit import recovered
from gateway.sessions.history import History
from gateway.sessions.prepare import Prepared
from gateway.sessions.prompt import start_of
from gateway.sessions.reader import AnswerReader
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import TurnRun


def _out_of_time(error: EngineError) -> bool:
    """The answer's own time was up, whoever wrote it."""
    return isinstance(error, EngineTimeout) and error.stage == "total"


def _parser(command: TurnCommand, prepared: Prepared) -> AnswerParser | None:
    """None where the engine's own text is the answer: by chat, and for families that write nothing but content."""
    if prepared.tokens is None or prepared.format is None or isinstance(prepared.prompt, ChatPrompt):
        return None
    tools = () if command.ask.tool_choice == "none" else command.ask.tools
    if prepared.format.kind == "plain" and not prepared.format.reasoning:
        return None
    return AnswerParser(prepared.tokens, prompt=prepared.prompt.delta, tools=tools, format=prepared.format)


class Generation:
    """`error`: what ended it, where something went wrong."""

    def __init__(
        self, room: TurnRoom, command: TurnCommand, history: History, prepared: Prepared, run: TurnRun
    ) -> None:
        self.room = room
        self.command = command
        self.history = history
        self.prepared = prepared
        self.run = run
        self.placement = prepared.placement
        self.reader = AnswerReader(_parser(command, prepared), room.new_id)
        self.error: GatewayError | None = None
        self.queued_s: float | None = None  # waited for a place at a replica; None: none came yet
        self.recovered = False  # the engine found the prompt too long, and a compaction made it fit
        self.failover = Failover(room, command)
        self.blame = Blame()
        self.onward: Continuation | None = None  # how the answer goes on after its replica was lost
        self.handed: Sequence[Mapping[str, Any]] = ()  # gateways that had the turn before
        self.resumed = False  # another gateway began it

    async def to_end(self) -> None:
        """Stream until the end, a failure (kept in `error`) or a cancel; once more where the engine had less room."""
        await self._pumped()
        if isinstance(self.error, ContextTooLong) and not self.reader.started and self.run.cancel_reason is None:
            fit = await recovered(self.room, self.command, self.history, self.prepared, self.error)
            if fit is not None:
                self.history, self.error, self.run.failure = fit[0], None, None
                self._take(fit[1])
                self.failover = Failover(self.room, self.command)
                self.recovered = True
                await self._pumped()
        self.blame.settle(self.room.fleet.now(), answered=self.reader.started)

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
            started = self.reader.started
            self.error = broken_off(error, self.failover.why) if started else from_engine(error)
        except GatewayError as error:
            self.error = error
        self.run.failure = self.error

    def flush(self) -> None:
        """Tell what a parser still held of an answer that was cut short."""
        if self.reader.finish is None:
            for piece in self.reader.flush():
                self.run.emit(piece)

    @property
    def stopped(self) -> bool:
        """Cut short by this gateway's end, and by nothing else."""
        return self.run.cancel_reason == "gateway_shutdown" and self.error is None and self.reader.finish is None

    @property
    def approximate(self) -> bool:
        """It rests on K/V that a full computation would not give, or may."""
        prompt = self.prepared.prompt
        if self.failover.moves and isinstance(prompt, IdsPrompt) and prompt.shift is not None:
            return True  # whether the replica that was lost took the leave, nobody can say
        return self.reader.usage is not None and self.reader.usage.approximate

    async def _pump(self) -> None:
        first: EngineError | None = None  # what broke the answer off
        if self.resumed and self.reader.num_ids:
            found = self._onward(await self.failover.here(self.history, self.prepared, self.reader.begun))
            if isinstance(found, Delta):
                self._read(found)
                return
            if not found:
                raise EngineLost("no replica of this gateway goes on with what another one began")
        while True:
            try:
                await self._stream(self.placement)
                return
            except EngineError as error:
                self._note_failure(self.placement, error)
                self.failover.failed(self.placement)
                first = first or (error if self.reader.started else None)
                found = await self._elsewhere(error)
                if isinstance(found, Delta):  # nothing was missing but the word that it was the end
                    self._read(found)
                    return
                if not found:
                    raise first or error from None

    async def _elsewhere(self, error: EngineError) -> bool | Delta:
        """Whether there is another replica to go on at; the last delta where the answer was over."""
        if not self.reader.started:
            prepared = await self.failover.anew(self.history) if error.retryable else None
            if prepared is not None:
                self._take(prepared)
            return prepared is not None
        if not may_go_on(error):
            return False
        begun = self.reader.begun
        return self._onward(await self.failover.onward(self.history, self.prepared, begun, self.placement, error))

    def _onward(self, found: Continuation | Delta | None) -> bool | Delta:
        if isinstance(found, Continuation):
            self.onward = found
            self.placement = replace(found.placement, changed_from=self.prepared.placement.changed_from)
            self.prepared = replace(self.prepared, sampling=found.sampling)
            return True
        return found or False

    def _take(self, prepared: Prepared) -> None:
        """Go out as `prepared` says; nothing of an answer has come."""
        self.prepared, self.placement = prepared, prepared.placement
        self.reader = AnswerReader(_parser(self.command, prepared), self.room.new_id)

    async def _stream(self, placement: Placement) -> None:
        replica, onward = placement.replica, self.onward
        moves = len(self.failover.moves) + len(self.handed)
        request = GenerateRequest(
            request_id=f"{self.run.turn_id}-{moves}" if moves else self.run.turn_id,
            model=self.command.ask.model,
            prompt=onward.prompt if onward is not None else self.prepared.prompt,
            sampling=onward.asked() if onward is not None else self.prepared.sampling,
            cache_salt=self.room.cache_salt(self.command.tenant_id),
            min_bits=self.command.ask.min_bits,
            shared=self._shared(),
        )
        fleet, path = self.room.fleet, self.prepared.path or Path(self.prepared.prompt_tokens)
        place = replica.taken(self.command.tenant_id, cost=self._work(placement), going_on=onward is not None)
        async with place as waited_s:
            self.queued_s = (self.queued_s or 0.0) + waited_s
            expected = self._expected(placement, path)
            with fleet.outlook.sending(replica.name, request.request_id, path, expected, fleet.wall()) as sending:
                deltas = replica.engine.generate(request)
                async with aclosing(onward.whole(deltas) if onward is not None else deltas) as stream:
                    async for delta in stream:
                        replica.heard_at = fleet.now()
                        if replica.half_open:
                            replica.answered(replica.heard_at)
                        sending.first()
                        self.blame.settle(replica.heard_at, answered=True)
                        self._read(delta)
                if self.reader.finish is None:
                    raise EngineLost("the stream ended without a finish", replica=replica.name)
                sending.ended(self.reader.usage, self.reader.ids, fleet.wall(), judged=onward is None)
        replica.answered(fleet.now())

    def _expected(self, placement: Placement, path: Path) -> int:
        """Tokens that the replica is believed to hold of the prompt, now that it goes out: other sessions may have
        brought their common beginning there since the turn was placed."""
        expected = placement.expected_cached_tokens
        if self.onward is None and path.known and placement.reason != "pinned":
            outlook, at = self.room.fleet.outlook, self.room.fleet.wall()
            expected = max(expected, round(outlook.cached(placement.replica.name, path, at)))
            self.placement = replace(placement, expected_cached_tokens=expected)
        return expected

    def _shared(self) -> bool:
        """Whether other sessions begin with this turn's system prompt."""
        built, session = self.prepared.built, self.command.session_id
        if built is None or session is None or not built.marks.system_tokens:
            return False
        return self.room.prompts.shared(self.command.tenant_id, start_of(built.fingerprint), session)

    def _work(self, placement: Placement) -> float:
        """What the turn costs its tenant in the line before a replica: tokens to compute, and to generate at most."""
        prefill = self.prepared.prompt_tokens - placement.expected_cached_tokens
        return float(max(prefill, 0) + self.prepared.sampling.max_tokens)

    def _read(self, delta: Delta) -> None:
        """Raises EngineBroken for ids that are no tokens: kept in the path, they would spoil every later turn."""
        tokens = self.prepared.tokens
        if tokens is not None and not tokens.vocabulary.holds(delta.ids):
            name = self.placement.replica.name
            raise EngineBroken(f"{name}: it generated ids that are no tokens of the model", replica=name)
        for piece in self.reader.push(delta):
            self.run.emit(piece)

    def _note_failure(self, placement: Placement, error: EngineError) -> None:
        """A request that was refused is no failure of the replica, nor is a full queue or a rate limit."""
        if isinstance(error, EngineBroken) and not self.reader.started:
            self.blame.broke(placement.replica, error)
        elif not isinstance(error, RequestRefused | UnknownBase | EngineOverloaded) and not _out_of_time(error):
            lost = isinstance(error, EngineUnreachable | EngineLost)
            placement.replica.failed(error, self.room.fleet.now(), lost=lost)
