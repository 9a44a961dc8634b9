"""Runs compactions: after a turn in the background, before one that would not fit, and when somebody asks.

    take a snapshot -> plan -> summaries (model, checked; or extracted) -> the new view, rendered and counted
      -> its prefix prefilled on the pinned replica -> committed, if nobody changed what is shown meanwhile

It takes no lease and stops no turn. A turn that comes meanwhile goes on from the old view; the one after the commit
goes on from the new. Every run is a row, also one that failed, and one that was not worth it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import structlog

from compression.budget import Policy, breaker_open, least_gain
from compression.plan import NoPlan, Plan, Range, Urgency
from compression.summarize import Written, write_segment
from compression.view import View, fold, orphans
from engines.contract import EngineError
from gateway.errors import GatewayError
from gateway.fleet.fleet import Fleet
from gateway.sessions.items import messages_from_items
from gateway.sessions.models import Models
from gateway.sessions.prompt import aside, system_message
from gateway.sessions.redraft import anchor, redrafted
from gateway.sessions.registry import Registry
from gateway.sessions.run import Compacted
from gateway.sessions.sizing import counter
from gateway.sessions.snapshot import Snapshot, replica_for, take
from gateway.sessions.summariser import Asked, Summariser, beside, prefill
from gateway.store.compaction_records import (
    CompactionOver,
    CompactionRecord,
    CompactionRunning,
    NewCompaction,
    ViewMoved,
)
from gateway.store.records import HEAD, SessionRecord, StoreUnavailable, UnknownTurn
from gateway.store.sessions import Store
from gateway.traces import trace_of

log = structlog.get_logger(__name__)

Trigger = Literal["background", "foreground", "manual"]
DEADLINE_S = 600.0  # a run that is not done by then is taken for dead
CATCH_UP = 3  # times that turns which came meanwhile are prefilled too, before the switch
LOOKED_BACK = 8  # rows that the breaker reads


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing was done: there is nothing to do, or not by itself. `plan` has the numbers, where there was one."""

    reason: str
    plan: NoPlan | None = None
    tokens: int = 0


Outcome = CompactionRecord | Idle


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


class Compactions:
    """One run at a time for each session; `at_once` of them in the background for the whole gateway."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        models: Models,
        registry: Registry,
        *,
        policy: Callable[[SessionRecord], Policy],
        new_id: Callable[[str], str],
        session_name: Callable[[str, str], str],
        cache_salt: Callable[[str], str],
        default_max_tokens: int,
        at_once: int,
        summary_timeout_s: float,
    ) -> None:
        self._store, self._fleet, self._models, self._registry = store, fleet, models, registry
        self.policy, self._new_id, self._cache_salt = policy, new_id, cache_salt
        self._session_name = session_name
        self._default_max_tokens = default_max_tokens
        self._summariser = Summariser(fleet, models, timeout_s=summary_timeout_s)
        self._slots = asyncio.Semaphore(at_once)
        self._running: dict[tuple[str, str], asyncio.Task[Outcome]] = {}

    def is_running(self, tenant_id: str, session_id: str) -> bool:
        return (tenant_id, session_id) in self._running

    async def close(self) -> None:
        """Stop what runs; each row says so, or lapses."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, tenant_id: str, session_id: str) -> None:
        """The session is deleted: stop working on it."""
        if (task := self._running.get((tenant_id, session_id))) is not None:
            task.cancel()

    # ---- when

    def after_turn(self, session: SessionRecord, *, used_tokens: int, window: int | None) -> None:
        """Compact in the background if the path is past the trigger now. Cheap where it is not."""
        policy = self.policy(session)
        if window is None or policy.strategy == "off" or policy.mode == "manual":
            return
        key = session.tenant_id, session.id
        reserve = min(int(session.policy.get("max_output_tokens") or self._default_max_tokens), window // 4)
        if used_tokens + reserve <= policy.trigger_ratio * window or key in self._running:
            return
        self._start(session.tenant_id, session.id, "background", "auto", None, 0, HEAD)

    async def ask(
        self, session: SessionRecord, *, strategy: str | None = None, dry_run: bool = False
    ) -> Outcome | Plan | NoPlan:
        """Compact now because somebody asks; a dry run only plans."""
        policy = self.policy(session)
        if strategy is not None:
            policy = replace(policy, strategy=strategy)  # type: ignore[arg-type]
        if dry_run:
            taken = await self._taken(session, policy, HEAD)
            return taken.plan("asked") if taken is not None else Idle("nothing to compact")
        await self._done(session.tenant_id, session.id)
        return await self._start(session.tenant_id, session.id, "manual", "asked", policy, 0, HEAD)

    async def make_room(
        self, session: SessionRecord, *, incoming_tokens: int, parent: str | None, truncate: bool
    ) -> Outcome:
        """Before a turn that would not fit: wait for the run that is on its way, else compact while it waits."""
        ended = await self._done(session.tenant_id, session.id)
        if isinstance(ended, CompactionRecord) and ended.status == "committed":
            return ended
        policy = self.policy(session)
        if truncate:
            policy = replace(policy, strategy="trim")
        task = self._start(session.tenant_id, session.id, "foreground", "hard", policy, incoming_tokens, parent)
        return await asyncio.shield(task)

    async def _done(self, tenant_id: str, session_id: str) -> Outcome | None:
        """The end of the run that is on its way here; None where there is none, or it failed."""
        task = self._running.get((tenant_id, session_id))
        if task is None:
            return None
        await asyncio.wait({task})
        return None if task.cancelled() or task.exception() is not None else task.result()

    def _start(
        self,
        tenant_id: str,
        session_id: str,
        trigger: Trigger,
        urgency: Urgency,
        policy: Policy | None,
        incoming: int,
        parent: str | None,
    ) -> asyncio.Task[Outcome]:
        key = tenant_id, session_id
        work = self._run(tenant_id, session_id, trigger, urgency, policy, incoming, parent)
        task = asyncio.create_task(work, name=f"compaction-{session_id}")
        self._running[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: tuple[str, str], task: asyncio.Task[Outcome]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, StoreUnavailable | GatewayError):
            log.warning("a compaction was given up", session_id=key[1], reason=str(error))
        else:
            log.error("a compaction failed inside the gateway", session_id=key[1], trace=trace_of(error))

    # ---- how

    async def _taken(self, session: SessionRecord, policy: Policy, parent: str | None) -> Snapshot | None:
        return await take(
            self._store,
            self._fleet,
            self._models,
            session,
            policy,
            default_max_tokens=self._default_max_tokens,
            parent=parent,
        )

    async def _run(
        self,
        tenant_id: str,
        session_id: str,
        trigger: Trigger,
        urgency: Urgency,
        policy: Policy | None,
        incoming: int,
        parent: str | None,
    ) -> Outcome:
        if trigger == "background":
            async with self._slots:
                return await self._attempt(tenant_id, session_id, trigger, urgency, policy, incoming, parent)
        return await self._attempt(tenant_id, session_id, trigger, urgency, policy, incoming, parent)

    async def _attempt(
        self,
        tenant_id: str,
        session_id: str,
        trigger: Trigger,
        urgency: Urgency,
        policy: Policy | None,
        incoming: int,
        parent: str | None,
    ) -> Outcome:
        session = await self._store.get_session(tenant_id, session_id)
        if session is None:
            return Idle("the session is gone")
        taken = await self._taken(session, policy or self.policy(session), parent)
        if taken is None:
            return Idle("nothing to compact")
        if urgency == "auto" and await self._breaker(taken):
            return Idle("the last compactions brought nothing; the next comes when the conversation has grown")
        plan = await asyncio.to_thread(taken.plan, urgency, incoming_tokens=incoming)
        if isinstance(plan, NoPlan):
            await self._note(taken, trigger, plan)
            return Idle(plan.reason, plan, taken.prompt_tokens)
        began = await self._begin(taken, trigger, plan)
        if began is None:
            return Idle("another compaction of this session is running, or what it shows has changed")
        return await self._carried_out(taken, began, plan, trigger, incoming)

    async def _breaker(self, taken: Snapshot) -> bool:
        """Whether this session has compacted in vain too often to try again at this length."""
        rows = await self._store.list_compactions(taken.session.tenant_id, taken.session.id, limit=LOOKED_BACK)
        vain = 0
        for row in rows:
            if row.status not in ("failed", "skipped") or row.trigger == "manual":
                break
            vain += 1
        then = int(rows[0].report.get("tokens_before") or 0) if vain else 0
        return breaker_open(vain, then, taken.prompt_tokens, taken.window)

    async def _note(self, taken: Snapshot, trigger: Trigger, plan: NoPlan) -> None:
        """A plan that came to nothing is shown, but for the one that found nothing to do."""
        if plan.reason in ("off", "below_trigger") or trigger == "manual":
            return
        report = {"tokens_before": plan.tokens_before, "tokens_after": plan.tokens_after}
        await self._store.note_compaction(self._new(taken, trigger, plan.as_json()), error=None, report=report)

    def _new(self, taken: Snapshot, trigger: Trigger, plan: Mapping[str, Any]) -> NewCompaction:
        view = taken.history.view
        return NewCompaction(
            tenant_id=taken.session.tenant_id,
            session_id=taken.session.id,
            id=self._new_id("cmp"),
            base_id=view.id,
            trigger=trigger,
            head_turn_id=taken.head_id,
            plan=plan,
            owner=self._registry.owner,
            deadline_s=DEADLINE_S,
            view_version=taken.session.view_version,
        )

    async def _begin(self, taken: Snapshot, trigger: Trigger, plan: Plan) -> CompactionRecord | None:
        try:
            return await self._store.begin_compaction(self._new(taken, trigger, plan.as_json()))
        except (CompactionRunning, ViewMoved, UnknownTurn, ValueError):
            return None

    async def _carried_out(
        self, taken: Snapshot, began: CompactionRecord, plan: Plan, trigger: Trigger, incoming: int
    ) -> Outcome:
        spent = _Spent(time.monotonic())
        told = {"tokens_before": taken.prompt_tokens}
        self._tell(began, "started", told)
        place = (began.tenant_id, began.session_id, began.id)
        try:
            view = await self._redrafted(taken, plan, began.id, spent, urgent=trigger != "background")
            after = await self._checked(taken, view, plan, incoming, hard=trigger == "foreground")
            if trigger != "foreground":
                await self._warm(taken, view, spent)
            report = spent.report(**told, tokens_after=after)
            touched = anchor(taken.turns, view)
            assert touched is not None, "a plan touches a turn"
            await self._store.commit_compaction(
                *place,
                view=view.as_json(),
                plan=plan.as_json(),
                report=report,
                anchor_turn_id=touched,
                expected_view=taken.session.view_version,
            )
        except (Unfit, ViewMoved, CompactionOver, UnknownTurn, EngineError, GatewayError) as error:
            await self._failed(began, spent, told, _code_of(error), str(error))
            return await self._row(began)
        except asyncio.CancelledError:
            await asyncio.shield(self._failed(began, spent, told, "cancelled", "the gateway or the session ended"))
            raise
        except Exception as error:
            await self._failed(began, spent, told, "internal", f"it failed inside the gateway: {type(error).__name__}")
            raise
        self._registry.heads.forget(began.tenant_id, began.session_id)
        self._tell(began, "completed", report)
        return await self._row(began)

    async def _row(self, began: CompactionRecord) -> Outcome:
        row = await self._store.get_compaction(began.tenant_id, began.session_id, began.id)
        return row if row is not None else Idle("the session is gone")

    async def _failed(
        self, began: CompactionRecord, spent: _Spent, told: Mapping[str, Any], code: str, message: str
    ) -> None:
        error = {"code": code, "message": message}
        report = spent.report(**told)
        try:
            await self._store.end_compaction(
                began.tenant_id, began.session_id, began.id, status="failed", error=error, report=report
            )
        except StoreUnavailable as away:
            log.warning("a failed compaction stays marked as running", compaction_id=began.id, reason=str(away))
        self._tell(began, "failed", {**report, "error": error})

    def _tell(self, began: CompactionRecord, what: Literal["started", "completed", "failed"], report: Any) -> None:
        """Those who follow the session's turn hear of it."""
        run = self._registry.of_session(began.tenant_id, began.session_id)
        if run is not None and run.ended is None:
            run.emit(Compacted(what, began.id, began.trigger, report))

    async def _redrafted(self, taken: Snapshot, plan: Plan, id: str, spent: _Spent, *, urgent: bool) -> View:
        written: dict[Range, Written] = {}
        count = counter(taken.model)
        for part in plan.ranges:
            written[part] = await self._written(taken, plan, part, id, spent, urgent=urgent)
        return await asyncio.to_thread(
            redrafted,
            taken.history.view,
            plan,
            taken.turns,
            written,
            id=id,
            count=count,
            new_id=lambda: self._new_id("seg"),
        )

    async def _written(
        self, taken: Snapshot, plan: Plan, part: Range, id: str, spent: _Spent, *, urgent: bool
    ) -> Written:
        if plan.way == "trim":
            spent.sources["dropped"] += 1
            return Written(f"[{len(part.turn_ids)} earlier turns were left out]", "dropped", (), 0, 0)
        asked = Asked(None)
        if plan.way == "summarize":
            salt = self._cache_salt(taken.session.tenant_id)
            request_id = f"{id}-{len(spent.asked)}"
            asked = await self._summariser.ask(
                taken, part, name=self._name(taken), salt=salt, request_id=request_id, urgent=urgent
            )
            spent.asked.append(asked)
            if asked.problem:
                spent.problems.append(asked.problem)
        turns = [turn for turn in taken.turns if turn.id in part.turn_ids]
        written = await asyncio.to_thread(
            write_segment,
            asked.text,
            turns,
            budget_tokens=part.budget_tokens,
            count=counter(taken.model),
            finished=asked.finished,
        )
        spent.sources[written.source] += 1
        spent.problems += written.problems
        return written

    async def _checked(self, taken: Snapshot, view: View, plan: Plan, incoming: int, *, hard: bool) -> int:
        """Tokens of the prompt under the new view. Raises Unfit where it must not be committed."""
        folded = fold(
            taken.turns,
            view,
            pinned=taken.pinned,
            placement=taken.model.placement if taken.model is not None else "exchange",
            reasoning=taken.policy.reasoning,
        )
        if lost := orphans(folded.items):
            raise Unfit(f"it would leave {len(lost)} tool outputs without their call")
        before = taken.prompt_tokens
        after = plan.tokens_after - incoming
        if taken.model is not None:
            after = len(await self._rendered(taken, view)) // 4
        if before - after < (1 if hard else least_gain(taken.window) // 2):
            raise Unfit(f"it would free {before - after} of {before} tokens")
        return after

    async def _rendered(self, taken: Snapshot, view: View) -> bytes:
        """Ids of the whole path under `view`, up to where its next turn begins, u32 little-endian."""
        assert taken.model is not None
        model, ask = taken.model, taken.ask()
        folded = fold(
            taken.turns, view, pinned=taken.pinned, placement=model.placement, reasoning=taken.policy.reasoning
        )
        messages = system_message(ask.system, folded) + messages_from_items(folded.items)
        return await aside(lambda: model.render(messages, tools=ask.tools), messages)

    def _name(self, taken: Snapshot) -> str:
        return beside(self._session_name(taken.session.tenant_id, taken.session.id))

    async def _warm(self, taken: Snapshot, view: View, spent: _Spent) -> None:
        """Prefill the new prefix where the session's next turn will go; turns that came meanwhile too."""
        for _ in range(CATCH_UP):
            placement = replica_for(taken.session.model, taken.history, self._fleet)
            if placement is None or self._models.by_ids(taken.session.model, placement.replica) is None:
                return
            ids = await self._rendered(taken, view)
            salt = self._cache_salt(taken.session.tenant_id)
            try:
                spent.prefill_tokens += await prefill(
                    placement.replica,
                    taken.session.model,
                    ids,
                    name=self._name(taken),
                    salt=salt,
                    request_id=f"{view.id}-prefill",
                )
            except EngineError as error:  # the next turn prefills it then
                spent.problems.append(f"the new prefix was not prefilled: {error}")
                return
            session = await self._store.get_session(taken.session.tenant_id, taken.session.id)
            if session is None or session.head_turn_id in (None, taken.head_id):
                return
            later = await self._taken(session, taken.policy, HEAD)
            if later is None or taken.head_id not in {turn.id for turn in later.turns}:
                return
            taken = later


class Unfit(Exception):
    """A view that was made and must not be committed."""


def _code_of(error: Exception) -> str:
    if isinstance(error, ViewMoved | CompactionOver | UnknownTurn):
        return "view_moved"
    return "unfit" if isinstance(error, Unfit) else str(getattr(error, "code", "engine_failed"))
