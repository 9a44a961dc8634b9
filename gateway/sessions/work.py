"""One turn's work, from transaction 1 to its terminal event: the answer, its handing over, its end.

Runs in a task of its own. What goes wrong here is the turn's last event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from engines.contract import Capabilities
from gateway.fleet.placement import Placement
from gateway.limits.admission import Admission
from gateway.sessions.command import TurnCommand
from gateway.sessions.ending import Ending
from gateway.sessions.events import EventLog
from gateway.sessions.generation import Generation
from gateway.sessions.handover import TakenUp, handover_of
from gateway.sessions.history import History
from gateway.sessions.outcome import as_failure, outcome
from gateway.sessions.prepare import Prepared
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import Piece, TurnRun
from gateway.store.handovers import Offer
from gateway.store.records import Begun, StoreUnavailable, TurnRecord
from gateway.store.usage_records import amount_of

log = structlog.get_logger(__name__)


class TurnWork:
    """One turn from transaction 1 to its terminal event. `told`: what was told of its answer elsewhere."""

    def __init__(
        self,
        room: TurnRoom,
        command: TurnCommand,
        history: History,
        prepared: Prepared,
        run: TurnRun,
        begun: Begun | None,
        held: Admission | None = None,
    ) -> None:
        self.room, self.command, self.run = room, command, run
        self.answer = Generation(room, command, history, prepared, run)
        self.ending = Ending(room, command, run, self.answer, begun)
        self.told: Sequence[Piece] = ()
        self.held = held

    @property
    def seq(self) -> int | None:
        return self.ending.seq

    @property
    def placement(self) -> Placement:
        return self.answer.placement

    def metadata(self, placement: Placement) -> dict[str, Any]:
        return self.ending.metadata(placement)

    @classmethod
    def taken_up(cls, room: TurnRoom, up: TakenUp, run: TurnRun, record: TurnRecord) -> TurnWork:
        """A turn that another gateway began, from its ids on. `told`: what was told of the answer there."""
        turn, handover = record.turn, up.handover
        begun = Begun(turn.seq, run.fence, turn.parent_id, turn_id=turn.id)
        work = cls(room, up.command, up.history, up.prepared, run, begun, handover.admission)
        answer = work.answer
        answer.handed = handover.handed
        answer.failover.moves = list(handover.moves)
        answer.failover.before = Capabilities(kind="", models=(), returns_ids=True, tokenizer=handover.tokenizer)
        answer.resumed = True
        if handover.begun.count:
            work.told = answer.reader.resume(handover.begun, handover.call_ids)
        return work

    async def run_to_end(self) -> None:
        written = len(self.run.events) if self.answer.resumed else 0
        log = EventLog(self.room.store, self.run, written=written) if self.command.persist_events else None
        bug: Exception | None = None
        try:
            await self.answer.to_end()
        except Exception as error:  # noqa: BLE001 - the turn is stored as failed first, then it is raised
            bug, self.answer.error = error, as_failure(error)
            self.run.failure = self.answer.error
        try:
            if log is not None:
                await log.flush()
            if self.answer.stopped and await self._handed_over(log):
                self.run.move()
                return
            self.answer.flush()
            self.run.emit(await self.ending.finish())
            self.ending.consider_compaction()
        except Exception as error:
            self.run.failure = as_failure(error)
            self.run.emit(self.ending.ended(outcome(self.run, self.answer.reader, self.run.failure), {}))
            raise
        finally:
            self._leave()
            if log is not None:
                await log.close()
        if bug is not None:
            raise bug

    def _leave(self) -> None:
        """What it held of its tenant's limits goes back, or on with it."""
        if self.run.moved:
            self.room.gate.hand_over(self.held)
        else:
            self.room.gate.end(self.held, amount_of(self.ending.usage()).tokens)

    async def _handed_over(self, events: EventLog | None) -> bool:
        """Whether another gateway goes on with it."""
        run, answer, owner = self.run, self.answer, self.room.registry.owner
        if run.session_id is None:
            return False
        if events is not None and not events.complete:
            log.warning("a turn is not handed over: its events could not be stored", turn_id=run.turn_id)
            return False
        handover = handover_of(
            self.command,
            answer.history,
            answer.prepared,
            answer.reader,
            answer.placement,
            moves=answer.failover.moves,
            handed=[*answer.handed, {"from": owner.partition("/")[0], "at_tokens": answer.reader.num_ids}],
            num_events=len(run.events),
            stored_events=events is not None,
            admission=self.held,
        )
        if handover is None:
            return False
        try:
            offer = Offer(run.tenant_id, run.session_id, run.turn_id, run.fence, owner, handover.to_bytes())
            return await self.room.registry.offers.taken(offer)
        except StoreUnavailable as error:  # whether it is still this gateway's shows with transaction 2
            log.warning("a turn is not handed over", turn_id=run.turn_id, reason=str(error))
            return False
