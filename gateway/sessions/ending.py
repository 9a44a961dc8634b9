"""How a turn comes to its end: transaction 2, what is remembered of it, and the terminal event with what it tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import structlog

from gateway.errors import BadRequest, QueueRefused, Unavailable, UpstreamFailed
from gateway.fleet.placement import Placement
from gateway.sessions.command import TurnCommand
from gateway.sessions.generation import Generation
from gateway.sessions.heads import made_with, standing
from gateway.sessions.history import History
from gateway.sessions.outcome import Outcome, finish_turn, outcome
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import TurnEnded, TurnRun
from gateway.sessions.windows import window_of
from gateway.store.records import Begun, FinishTurn, LeaseLost, StoreUnavailable
from gateway.store.usage_records import Account, amount_of, day_of

log = structlog.get_logger(__name__)

COMMIT_RETRY_S = (0.1, 0.3, 1.0, 2.0, 4.0)  # a database that went away gets this long to take the answer
COMMIT_WITHIN_S = 10.0  # and one that hangs, or is locked, this long: no try begins after it


class Ending:
    """Of one turn, whose answer is `answer`."""

    def __init__(
        self, room: TurnRoom, command: TurnCommand, run: TurnRun, answer: Generation, begun: Begun | None
    ) -> None:
        self.room, self.command, self.run, self.answer = room, command, run, answer
        self.seq = begun.seq if begun is not None else None
        self.made = begun is not None and begun.made

    async def finish(self) -> TurnEnded:
        """Transaction 2, tried again while the database is away; then the terminal event."""
        result = outcome(self.run, self.answer.reader, self.answer.error)
        metadata = self.metadata(self.answer.placement)
        if self.command.session_id is None:
            self._note_usage()
            return self.ended(result, metadata)
        if result.code == "lease_lost":
            return await self._lease_lost(result, metadata)
        if isinstance(self.answer.error, BadRequest | QueueRefused) and not self.answer.reader.started:
            return await self._refused(result, metadata)
        write = finish_turn(
            self.command,
            self.answer.history,
            self.answer.prepared,
            self.run,
            self.answer.reader,
            result,
            self.answer.placement,
            self.usage(),
        )
        write = replace(write, metadata={**write.metadata, **self.notes()})
        began = time.monotonic()
        for pause_s in (*COMMIT_RETRY_S, None):
            try:
                await self.room.store.finish_turn(write)
                self._remember(write)
                return self.ended(result, metadata)
            except LeaseLost:
                return await self._lease_lost(result, metadata)
            except StoreUnavailable as error:
                if pause_s is None or time.monotonic() - began > COMMIT_WITHIN_S:
                    return self._not_persisted(result, error)
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    def _note_usage(self) -> None:
        """Of a turn that no session keeps."""
        command, room = self.command, self.room
        names = (command.key_id, command.user_ref or "", "", command.ask.model)
        account = Account(command.tenant_id, day_of(room.clock()), *names, "turn")
        room.store.note_usage(account, amount_of(self.usage()))

    async def _lease_lost(self, result: Outcome, metadata: Mapping[str, Any]) -> TurnEnded:
        assert self.command.session_id is not None
        await self._forget_if_gone(self.command.session_id)
        message = "another gateway took this session over"
        self.run.failure = UpstreamFailed(message, code="lease_lost", retry_after_s=1.0)
        return self.ended(result.failed("lease_lost", message), metadata)

    def _not_persisted(self, result: Outcome, error: StoreUnavailable) -> TurnEnded:
        """Whether transaction 2 was heard of late is not known: the same idempotency key tells, or runs it again."""
        log.error("an answer could not be stored", turn_id=self.run.turn_id, reason=str(error)[:200])
        self.run.failure = Unavailable(
            "the answer could not be stored: the database does not answer; send the request again",
            code="not_persisted",
            retry_after_s=1.0,
        )
        return self.ended(result.failed(self.run.failure.code, self.run.failure.message), {})

    async def _forget_if_gone(self, session_id: str) -> None:
        """Where the session was erased while this turn ran, replicas have read of it since: they forget once more."""
        tenant_id = self.command.tenant_id
        try:
            if await self.room.store.standing(tenant_id, session_id) == "gone":
                await self.room.store.forget_later(tenant_id, session_id)
        except StoreUnavailable as error:
            log.warning("what replicas keep of an erased session waits", session_id=session_id, reason=str(error))

    async def _refused(self, result: Outcome, metadata: Mapping[str, Any]) -> TurnEnded:
        """The engine does not take what was asked, or no place came free: nothing of it stays."""
        assert self.command.session_id is not None
        try:
            await self.room.store.release_turn(
                self.command.tenant_id, self.command.session_id, self.run.turn_id, self.run.fence
            )
        except (LeaseLost, StoreUnavailable) as error:
            log.warning("a refused turn stays until its lease ends", turn_id=self.run.turn_id, reason=str(error))
        return self.ended(result, metadata)

    def _remember(self, write: FinishTurn) -> None:
        """Where the session stands now, for its next turn."""
        heads, session, now = self.room.registry.heads, self.answer.history.session, self.room.clock()
        if session is None and self.made and self.command.create is not None:
            session = made_with(self.command.create, now)
        moves = self.answer.placement.replica.draining  # its session is moved: its pin changes in the database alone
        if session is None or not write.move_head or self.seq is None or moves:
            heads.forget(write.tenant_id, write.session_id)
            return
        parent_id = self.answer.history.head.turn_id
        view = self.answer.history.standing
        heads.put(standing(session, self.command, write, parent_id=parent_id, seq=self.seq, now=now, view=view))

    def consider_compaction(self) -> None:
        """The turn is told; now there is time to make room for those to come."""
        known = self.room.registry.heads.get(self.command.tenant_id, self.command.session_id or "")
        if known is None or known.last.turn.id != self.run.turn_id:
            return
        if self.answer.approximate:
            self.room.compactions.make_exact(known.session)
        history = History(last=known.last)
        window = window_of(self.command.ask.model, self.room.fleet, self.room.models, history)
        past = self.command.compact_past
        self.room.compactions.after_turn(known.session, history, window=window, past=past)

    def notes(self) -> dict[str, Any]:
        """How the turn went out."""
        return {
            **self.command.metadata,
            "mode": self.answer.prepared.mode,
            "window": self.answer.prepared.window,
            "max_tokens": self.answer.prepared.sampling.max_tokens,
            **({"queued_ms": round(self.answer.queued_s * 1000, 1)} if self.answer.queued_s is not None else {}),
            **({"approximate": True} if self.answer.approximate else {}),
            **({"context_recovered": True} if self.answer.recovered else {}),
            **({"continued": self.answer.failover.moves} if self.answer.failover.moves else {}),
            **({"handed_over": list(self.answer.handed)} if self.answer.handed else {}),
        }

    def metadata(self, placement: Placement) -> dict[str, Any]:
        told = {**self.notes(), **placement.as_json()}
        if self.answer.prepared.built is not None:
            told["prefix_report"] = self.answer.prepared.built.report
        return told

    def ended(self, result: Outcome, metadata: Mapping[str, Any]) -> TurnEnded:
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
        """Tokens; of a turn that an engine neither answered nor reported on, none."""
        used, reader = self.answer.reader.usage, self.answer.reader
        begun = self.answer.prepared.prompt_tokens if reader.started else 0
        prompt = used.prompt_tokens if used is not None else begun
        output = used.output_tokens if used is not None else reader.num_ids
        told = {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_tokens": used.cached_tokens if used is not None else None,
        }
        if used is not None and used.prefix_bits is not None:
            told["prefix_bits"] = used.prefix_bits
        return {**told, "shifted_tokens": used.shifted_tokens} if used is not None and used.approximate else told
