"""One compaction, from its snapshot to the commit: summaries, the new view, its check, its prefix prefilled.

    plan -> summaries (model, checked; or extracted) -> the new view, rendered and counted
      -> its prefix prefilled on the pinned replica -> committed, if nobody changed what is shown meanwhile

Takes no lease and stops no turn. What goes wrong ends the row as failed, with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from compression.budget import least_gain
from compression.plan import Plan, Range
from compression.summarize import Written, write_segment
from compression.view import View, fold, orphans
from engines.contract import EngineError
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.sessions.history import load
from gateway.sessions.items import messages_from_items
from gateway.sessions.models import Models
from gateway.sessions.prompt import aside, system_message
from gateway.sessions.redraft import anchor, redrafted
from gateway.sessions.registry import Registry
from gateway.sessions.run import Compacted
from gateway.sessions.sizing import counter
from gateway.sessions.snapshot import Snapshot, replica_for, take
from gateway.sessions.summariser import Asked, Summariser, beside, prefill
from gateway.store.compaction_records import CompactionOver, CompactionRecord, ViewMoved
from gateway.store.records import HEAD, SessionRecord, StoreUnavailable, UnknownTurn
from gateway.store.sessions import Store

log = structlog.get_logger(__name__)

CATCH_UP = 3  # times that turns which came meanwhile are prefilled too, before the switch


class Unfit(Exception):
    """A view that was made and must not be committed."""


@dataclass(frozen=True, slots=True)
class CompactionRoom:
    """What a compaction needs of the gateway, wired once."""

    store: Store
    fleet: Fleet
    models: Models
    registry: Registry
    summariser: Summariser
    new_id: Callable[[str], str]
    session_name: Callable[[str, str], str]
    cache_salt: Callable[[str], str]
    default_max_tokens: int


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
    """A plan that is carried out for a row that has begun. `incoming`: tokens of the turn that waits for it."""

    def __init__(
        self, room: CompactionRoom, taken: Snapshot, began: CompactionRecord, plan: Plan, *, incoming: int = 0
    ) -> None:
        self._room, self._taken, self._began, self._plan = room, taken, began, plan
        self._incoming = incoming
        self._spent = _Spent(time.monotonic())
        self._waited_for = began.trigger == "foreground"
        self._told = {"tokens_before": taken.prompt_tokens}

    async def to_end(self) -> CompactionRecord | None:
        """The row as it ended; None: the session is gone."""
        taken, began = self._taken, self._began
        self._tell("started", self._told)
        try:
            view = await self._redrafted()
            after = await self._checked(view)
            if not self._waited_for:
                await self._warm(view)
            report = self._spent.report(**self._told, tokens_after=after)
            touched = anchor(taken.turns, view)
            assert touched is not None, "a plan touches a turn"
            await self._room.store.commit_compaction(
                began.tenant_id,
                began.session_id,
                began.id,
                view=view.as_json(),
                plan=self._plan.as_json(),
                report=report,
                anchor_turn_id=touched,
                expected_view=taken.session.view_version,
            )
        except (Unfit, ViewMoved, CompactionOver, UnknownTurn, EngineError, GatewayError) as error:
            await self._failed(_code_of(error), str(error))
            return await self._row()
        except asyncio.CancelledError:
            await asyncio.shield(self._failed("cancelled", "the gateway or the session ended"))
            raise
        except Exception as error:
            await self._failed("internal", f"it failed inside the gateway: {type(error).__name__}")
            raise
        self._room.registry.heads.forget(began.tenant_id, began.session_id)
        self._tell("completed", report)
        return await self._row()

    async def _row(self) -> CompactionRecord | None:
        return await self._room.store.get_compaction(self._began.tenant_id, self._began.session_id, self._began.id)

    async def _failed(self, code: str, message: str) -> None:
        began, error = self._began, {"code": code, "message": message}
        report = self._spent.report(**self._told)
        try:
            await self._room.store.end_compaction(
                began.tenant_id, began.session_id, began.id, status="failed", error=error, report=report
            )
        except StoreUnavailable as away:
            log.warning("a failed compaction stays marked as running", compaction_id=began.id, reason=str(away))
        self._tell("failed", {**report, "error": error})

    def _tell(self, what: Literal["started", "completed", "failed"], report: Mapping[str, Any]) -> None:
        """Those who follow the session's turn hear of it."""
        began = self._began
        run = self._room.registry.of_session(began.tenant_id, began.session_id)
        if run is not None and run.ended is None:
            run.emit(Compacted(what, began.id, began.trigger, report))

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
            return Written(f"[{len(part.turn_ids)} earlier turns were left out]", "dropped", (), 0, 0)
        asked = await self._asked(part) if self._plan.way == "summarize" else Asked(None)
        if asked.problem:
            spent.problems.append(asked.problem)
        written = await asyncio.to_thread(
            write_segment,
            asked.text,
            [turn for turn in taken.turns if turn.id in part.turn_ids],
            budget_tokens=part.budget_tokens,
            count=counter(taken.model),
            finished=asked.finished,
        )
        spent.sources[written.source] += 1
        spent.problems += written.problems
        return written

    async def _asked(self, part: Range) -> Asked:
        """A model's summary; nobody who waits for a turn waits for one."""
        if self._waited_for:
            return Asked(None, problem="a turn waited: no model was asked")
        asked = await self._room.summariser.ask(
            self._taken,
            part,
            name=self._name(),
            salt=self._room.cache_salt(self._began.tenant_id),
            request_id=f"{self._began.id}-{len(self._spent.asked)}",
            urgent=self._began.trigger == "manual",
        )
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
            after = len(await _rendered(taken, view)) // 4
        if before - after < (1 if self._waited_for else least_gain(taken.window) // 2):
            raise Unfit(f"it would free {before - after} of {before} tokens")
        return after

    # ---- before the switch

    def _name(self) -> str:
        return beside(self._room.session_name(self._began.tenant_id, self._began.session_id))

    async def _warm(self, view: View) -> None:
        """Prefill the new prefix where the session's next turn will go; turns that came meanwhile too."""
        room, taken = self._room, self._taken
        for _ in range(CATCH_UP):
            placement = replica_for(taken.session.model, taken.history, room.fleet)
            if placement is None or room.models.by_ids(taken.session.model, placement.replica) is None:
                return
            try:
                self._spent.prefill_tokens += await prefill(
                    placement.replica,
                    taken.session.model,
                    await _rendered(taken, view),
                    name=self._name(),
                    salt=room.cache_salt(taken.session.tenant_id),
                    request_id=f"{view.id}-prefill",
                )
            except EngineError as error:  # the next turn prefills it then
                self._spent.problems.append(f"the new prefix was not prefilled: {error}")
                return
            session = await room.store.get_session(taken.session.tenant_id, taken.session.id)
            if session is None or session.head_turn_id in (None, taken.head_id):
                return
            later = await take(
                room.store,
                room.fleet,
                room.models,
                session,
                taken.policy,
                default_max_tokens=room.default_max_tokens,
                parent=HEAD,
            )
            if later is None or taken.head_id not in {turn.id for turn in later.turns}:
                return
            taken = later


async def _rendered(taken: Snapshot, view: View) -> bytes:
    """Ids of the whole path under `view`, up to where its next turn begins, u32 little-endian."""
    assert taken.model is not None
    model, ask = taken.model, taken.ask()
    folded = fold(taken.turns, view, pinned=taken.pinned, placement=model.placement, reasoning=taken.policy.reasoning)
    messages = system_message(ask.system, folded) + messages_from_items(folded.items)
    return await aside(lambda: model.render(messages, tools=ask.tools), messages)


async def prefilled_path(room: CompactionRoom, session: SessionRecord) -> None:
    """Have the replica compute the session's path as it stands, unless it has; what fails is done by the next turn."""
    try:
        history = await load(room.store, session, HEAD)
        placement = replica_for(session.model, history, room.fleet)
        if placement is not None and history.head.tokens is not None:
            await prefill(
                placement.replica,
                session.model,
                await history.head.load_ids(),
                name=room.session_name(session.tenant_id, session.id),
                salt=room.cache_salt(session.tenant_id),
                request_id=f"{history.head.turn_id}-exact",
            )
    except (EngineError, GatewayError, StoreUnavailable) as error:
        log.warning("a path was not prefilled", session_id=session.id, reason=str(error))


def _code_of(error: Exception) -> str:
    if isinstance(error, ViewMoved | CompactionOver | UnknownTurn):
        return "view_moved"
    return "unfit" if isinstance(error, Unfit) else str(getattr(error, "code", "engine_failed"))
