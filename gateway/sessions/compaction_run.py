"""One compaction, from its snapshot to the commit: summaries, the new view, its check, its prefix prefilled.

    plan -> summaries (model, checked; or extracted) -> the new view, rendered and counted
      -> its prefix prefilled on the pinned replica -> committed, if nobody changed what is shown meanwhile

Where the next turn will hardly fit the old view, the commit comes first and the prefill after it. Takes no lease and
stops no turn. What goes wrong ends the row as failed, with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import structlog

from compression.budget import least_gain
from compression.plan import Plan, Range
from compression.segments import left_out
from compression.summarize import Written, write_segment
from compression.view import View, fold, orphans
from engines.contract import EngineError
from gateway.background import repeated
from gateway.errors import GatewayError
from gateway.sessions.compaction_room import CompactionRoom, Haste, unless
from gateway.sessions.prefilled import Prefilled, prefill_view, rendered
from gateway.sessions.redraft import anchor, redrafted
from gateway.sessions.run import Compacted
from gateway.sessions.sizing import counter
from gateway.sessions.snapshot import Snapshot
from gateway.sessions.summariser import Asked, beside
from gateway.store.compaction_records import CompactionOver, CompactionRecord, ViewMoved
from gateway.store.records import StoreUnavailable, UnknownTurn

log = structlog.get_logger(__name__)

DEADLINE_S = 30.0  # a run whose gateway did not say for so long that it is at work is taken for dead
RENEWED_S = 8.0  # how often it says so
COMMIT_RETRY_S = (0.3, 1.0, 3.0, 9.0)  # a database that went away gets this long to take the view; a turn does not wait


class Unfit(Exception):
    """A view that was made and must not be committed."""


@dataclass(slots=True)
class _Spent:
    """What a run cost."""

    began: float
    prefill_tokens: int = 0
    asked: list[Asked] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)

    def report(self, **more: Any) -> dict[str, Any]:
        answered = [asked for asked in self.asked if asked.prompt_tokens]
        return {
            "prefill_tokens": self.prefill_tokens + sum(a.prompt_tokens - a.cached_tokens for a in answered),
            "summary_calls": len(self.asked),
            "summary_cached_tokens": sum(asked.cached_tokens for asked in answered),
            "summary_output_tokens": sum(asked.output_tokens for asked in answered),
            "summariser": self.asked[0].model if self.asked else None,
            "sources": dict(self.sources),
            "problems": self.problems,
            "duration_s": round(time.monotonic() - self.began, 3),
            **more,
        }


class CompactionRun:
    """A plan that is carried out for a row that has begun. `incoming`: tokens of the turn that waits for it.

    `haste` may grow while it runs.
    """

    def __init__(
        self,
        room: CompactionRoom,
        taken: Snapshot,
        began: CompactionRecord,
        plan: Plan,
        *,
        haste: Haste,
        incoming: int = 0,
    ) -> None:
        self._room, self._taken, self._began, self._plan = room, taken, began, plan
        self._incoming = incoming
        self._spent = _Spent(time.monotonic())
        self._haste = haste
        self._told = {"tokens_before": taken.prompt_tokens}

    async def to_end(self) -> CompactionRecord | None:
        """The row as it ended; None: the session is gone."""
        began = self._began
        self._tell("started", began)
        try:
            async with repeated(self._renew, every_s=RENEWED_S, name="compaction-renewal"):
                view = await self._redrafted()
                after = await self._checked(view)
                await self._prefill(view, until=self._haste.pressed)
                report = self._spent.report(**self._told, tokens_after=after)
                await self._commit(view, report)
        except (Unfit, ViewMoved, CompactionOver, UnknownTurn, EngineError, GatewayError) as error:
            await self._failed(_code_of(error), str(error))
            return await self._row()
        except asyncio.CancelledError:
            await asyncio.shield(self._failed("cancelled", "the gateway or the session ended"))
            raise
        except StoreUnavailable as error:
            await self._failed("not_persisted", f"the view could not be stored: {error}")
            raise
        except Exception as error:
            await self._failed("internal", f"it failed inside the gateway: {type(error).__name__}")
            raise
        self._room.registry.heads.forget(began.tenant_id, began.session_id)
        row = await self._row()
        if row is not None:
            self._tell("completed", row)
            if self._haste.pressed.is_set():
                await self._prefill(view, until=self._haste.waited_for)
        return row

    async def _commit(self, view: View, report: Mapping[str, Any]) -> None:
        """Tried again while the database is away: said twice, a commit stays as it is."""
        began, touched = self._began, anchor(self._taken.turns, view)
        assert touched is not None, "a plan touches a turn"
        for pause_s in (*COMMIT_RETRY_S, None):
            try:
                await self._room.store.commit_compaction(
                    began.tenant_id,
                    began.session_id,
                    began.id,
                    view=view.as_json(),
                    plan=self._plan.as_json(),
                    report=report,
                    anchor_turn_id=touched,
                    expected_view=self._taken.session.view_version,
                )
                return
            except StoreUnavailable:
                if pause_s is None or self._haste.waited_for.is_set():
                    raise
                await asyncio.sleep(pause_s)

    async def _renew(self) -> None:
        """Where it runs no more, another took its place or the session is gone: what is left is not worth an engine."""
        began = self._began
        if not await self._room.store.renew_compaction(began.tenant_id, began.session_id, began.id, DEADLINE_S):
            self._haste.wait_for()

    async def _prefill(self, view: View, *, until: asyncio.Event) -> None:
        so_far = Prefilled()

        async def whole() -> Prefilled:
            await prefill_view(self._room, self._taken, view, self._name(), so_far)
            return so_far

        heard_out = await unless(until, whole())
        self._spent.prefill_tokens += so_far.tokens
        if so_far.problem:
            self._spent.problems.append(so_far.problem)
        elif heard_out is None:
            self._spent.problems.append(f"{self._haste.why}: the new prefix was not read before the switch")

    async def _row(self) -> CompactionRecord | None:
        """None: the session is gone, and with it goes what replicas read of it meanwhile."""
        began = self._began
        row = await self._room.store.get_compaction(began.tenant_id, began.session_id, began.id)
        if row is None:
            await self._room.store.forget_later(began.tenant_id, began.session_id)
        return row

    async def _failed(self, code: str, message: str) -> None:
        began, error = self._began, {"code": code, "message": message}
        report = self._spent.report(**self._told)
        try:
            await self._room.store.end_compaction(
                began.tenant_id, began.session_id, began.id, status="failed", error=error, report=report
            )
        except StoreUnavailable as away:
            log.warning("a failed compaction stays marked as running", compaction_id=began.id, reason=str(away))
        self._tell("failed", replace(began, status="failed", report=report, error=error))

    def _tell(self, what: Literal["started", "completed", "failed"], record: CompactionRecord) -> None:
        """Those who follow the session's turn hear of it."""
        began = self._began
        run = self._room.registry.of_session(began.tenant_id, began.session_id)
        if run is not None and run.ended is None:
            run.emit(Compacted(what, record))

    # ---- the new view

    async def _redrafted(self) -> View:
        taken = self._taken
        written = {part: await self._written(part) for part in self._plan.ranges}
        return await asyncio.to_thread(
            redrafted,
            taken.history.view,
            self._plan,
            taken.turns,
            written,
            id=self._began.id,
            count=counter(taken.model),
            new_id=lambda: self._room.new_id("seg"),
        )

    async def _written(self, part: Range) -> Written:
        spent, taken = self._spent, self._taken
        if self._plan.way == "trim":
            spent.sources["dropped"] += 1
            return Written(left_out(len(part.turn_ids)), "dropped", (), 0, 0)
        asked = await self._asked(part) if self._plan.way == "summarize" else Asked(None)
        if asked.problem:
            spent.problems.append(asked.problem)
        written = await asyncio.to_thread(
            write_segment,
            asked.text,
            part.of(taken.turns),
            budget_tokens=part.budget_tokens,
            count=counter(taken.model),
            finished=asked.finished,
        )
        spent.sources[written.source] += 1
        spent.problems += written.problems
        return written

    async def _asked(self, part: Range) -> Asked:
        """A model's summary, as long as there is time for one."""
        haste = self._haste
        if haste.pressed.is_set():
            return Asked(None, problem=f"{haste.why}: no model was asked")
        asking = self._room.summariser.ask(
            self._taken,
            part,
            name=self._name(),
            salt=self._room.cache_salt(self._began.tenant_id),
            request_id=f"{self._began.id}-{len(self._spent.asked)}",
            urgent=self._began.trigger == "manual",
        )
        asked = await unless(haste.pressed, asking) or Asked(None, problem=f"{haste.why}: the model was not heard out")
        self._spent.asked.append(asked)
        return asked

    async def _checked(self, view: View) -> int:
        """Tokens of the prompt under the new view. Raises Unfit where it must not be committed."""
        taken = self._taken
        placement = taken.model.placement if taken.model is not None else "exchange"
        folded = fold(taken.turns, view, pinned=taken.pinned, placement=placement, reasoning=taken.policy.reasoning)
        if lost := orphans(folded.items):
            raise Unfit(f"it would leave {len(lost)} tool outputs without their call")
        before, after = taken.prompt_tokens, self._plan.tokens_after - self._incoming
        if taken.model is not None:
            after = len(await rendered(taken, view)) // 4
        if before - after < (1 if self._began.trigger == "foreground" else least_gain(taken.window) // 2):
            raise Unfit(f"it would free {before - after} of {before} tokens")
        return after

    def _name(self) -> str:
        return beside(self._room.session_name(self._began.tenant_id, self._began.session_id))


def _code_of(error: Exception) -> str:
    if isinstance(error, ViewMoved | CompactionOver | UnknownTurn):
        return "view_moved"
    return "unfit" if isinstance(error, Unfit) else str(getattr(error, "code", "engine_failed"))
