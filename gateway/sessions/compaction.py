"""When a session is compacted: after a turn in the background, before one that would not fit, and when somebody asks.

A turn that comes while a run is under way goes on from the old view; the one after the commit goes on from the new.
Every run is a row, also one that failed, and one that was not worth it. How a run goes is in `compaction_run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import structlog

from compression.budget import Policy, Strategy, answer_reserve, pressing
from compression.plan import NoPlan, Plan, Urgency
from gateway.errors import GatewayError
from gateway.policy import LEAST_FALL
from gateway.sessions.compaction_pause import LOOKED_BACK, Pause, pause
from gateway.sessions.compaction_room import CompactionRoom, Haste
from gateway.sessions.compaction_run import DEADLINE_S, CompactionRun
from gateway.sessions.history import History
from gateway.sessions.prefilled import prefill_path
from gateway.sessions.snapshot import Snapshot, take
from gateway.store.compaction_records import (
    CompactionRecord,
    CompactionRunning,
    NewCompaction,
    Trigger,
    ViewMoved,
)
from gateway.store.records import HEAD, SessionRecord, StoreUnavailable, UnknownTurn
from gateway.traces import trace_of

log = structlog.get_logger(__name__)

MOST_RATIO = 0.999  # of the window: a trigger past it would never be reached
TRIES = 5  # of one that is asked for, while pins and reverts change what is shown


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing was done: there is nothing to do, or not by itself. `plan` has the numbers, where there was one.

    `reason`: a code, of the plan or of what stands against it, which `message` tells. `again`: what the session shows
    changed meanwhile; read it anew and ask again.
    """

    reason: str
    message: str = ""
    plan: NoPlan | None = None
    again: bool = False


CHANGED = Idle("changed", "what the session shows keeps changing: ask again", again=True)
GONE = Idle("gone", "the session is gone")
NO_TURNS = Idle("no_turns", "there is no turn yet, or nobody knows the model's window")
Outcome = CompactionRecord | Idle


@dataclass(frozen=True, slots=True)
class Wish:
    """Why and how far to compact. `policy` None: the session's; `parent`: the path; `view_version`: the session's,
    where the wish rests on what is shown."""

    trigger: Trigger
    urgency: Urgency
    policy: Policy | None = None
    parent: str | None = HEAD
    prompt_tokens: int = 0  # of the prompt that would not fit, with what comes in new
    window: int | None = None  # as an engine's refusal showed it
    view_version: int | None = None


@dataclass(slots=True)
class _Job:
    """A run, or its wait for a slot."""

    haste: Haste
    task: asyncio.Task[Outcome]
    queued: bool


async def _outcome(task: asyncio.Task[Outcome]) -> Outcome:
    """What comes of it, which goes on where nobody waits any more. GONE: it was stopped, as its session was deleted or
    the gateway ends."""
    await asyncio.wait({task})
    return GONE if task.cancelled() else task.result()


def _settled(made: Outcome) -> Outcome:
    """CHANGED where it came to nothing for what was pinned, reverted or committed meanwhile."""
    if isinstance(made, CompactionRecord) and made.error is not None and made.error["code"] == "view_moved":
        return CHANGED
    return made


def triggered_at(policy: Policy, tokens: int, reserve_tokens: int, window: int) -> Policy:
    """`policy`, with a path of so many `tokens` as its trigger."""
    ratio = min(MOST_RATIO, max(1, tokens + reserve_tokens) / window)
    target = min(policy.target_ratio, LEAST_FALL * ratio)
    return replace(policy, mode="auto", trigger_ratio=ratio, target_ratio=target)


class Compactions:
    """One run at a time for each session; `at_once` of them in the background for the whole gateway."""

    def __init__(self, room: CompactionRoom, *, policy: Callable[[SessionRecord], Policy], at_once: int) -> None:
        self.policy = policy
        self._room = room
        self._slots = asyncio.Semaphore(at_once)
        self.on_ended: Callable[[CompactionRecord], None] = lambda record: None
        self._running: dict[tuple[str, str], _Job] = {}
        self._prefills: dict[tuple[str, str], asyncio.Task[None]] = {}

    def is_running(self, tenant_id: str, session_id: str) -> bool:
        return (tenant_id, session_id) in self._running

    async def close(self) -> None:
        """Stop what runs; each row says so, or lapses."""
        tasks = [*(job.task for job in self._running.values()), *self._prefills.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, tenant_id: str, session_id: str) -> list[asyncio.Task[Any]]:
        """The session is deleted, or the gateway ends: stop working on it -> what is about to end."""
        job, prefill = self._running.get((tenant_id, session_id)), self._prefills.get((tenant_id, session_id))
        tasks: list[asyncio.Task[Any]] = [job.task] if job is not None else []
        tasks += [prefill] if prefill is not None else []
        for task in tasks:
            task.cancel()
        return tasks

    def make_exact(self, session: SessionRecord) -> None:
        """An answer rested on shifted KV: have the session's path computed as it is, in idle time."""
        key = session.tenant_id, session.id
        task = asyncio.create_task(prefill_path(self._room, session), name=f"exact-{session.id}")
        self._prefills[key] = task
        task.add_done_callback(lambda done: self._prefills.pop(key, None) if self._prefills.get(key) is done else None)

    def after_turn(
        self, session: SessionRecord, history: History, *, window: int | None, past: int | None = None
    ) -> None:
        """Compact in the background if the path is past the trigger now; a run that is on its way then makes haste
        where the next turn might have to wait for it. Cheap where it is not.

        `past`: the trigger that the turn named, in tokens of the path, in place of the policy's.
        """
        policy = self.policy(session)
        if window is None or policy.strategy == "off" or (policy.mode == "manual" and past is None):
            return
        asked = session.policy.get("max_output_tokens")
        reserve = answer_reserve(window, asked, self._room.default_max_tokens)
        named = triggered_at(policy, past, reserve, window) if past is not None else None
        ratio = (named or policy).trigger_ratio
        key, used = (session.tenant_id, session.id), history.used_tokens
        if key not in self._running and used + reserve > ratio * window:
            self._start(session, Wish("background", "auto", named))
        if (job := self._running.get(key)) is not None and pressing(window, used, reserve, history.turn_tokens):
            job.haste.press()

    async def ask(
        self, session: SessionRecord, *, strategy: Strategy | None = None, dry_run: bool = False
    ) -> Outcome | Plan | NoPlan:
        """Compact now because somebody asks; a dry run only plans. Goes on where who asked does not wait for it."""
        policy = self.policy(session)
        if strategy is not None:
            policy = replace(policy, strategy=strategy)
        if dry_run:
            taken = await self._taken(session, policy, HEAD)
            return await asyncio.to_thread(taken.plan, "asked") if taken is not None else NO_TURNS
        made: Outcome = CHANGED
        for _ in range(TRIES):
            await self._done(session)
            made = await _outcome(self._start(session, Wish("manual", "asked", policy)))
            if _settled(made) is not CHANGED:
                break
        return made

    async def make_room(
        self,
        session: SessionRecord,
        *,
        prompt_tokens: int,
        parent: str | None,
        truncate: bool,
        window: int | None = None,
    ) -> Outcome:
        """Before a turn that would not fit: hurry the run that is on its way, else compact while it waits."""
        ended = await self._done(session, hurry=True)
        if isinstance(ended, CompactionRecord) and ended.status == "committed":
            return ended
        policy = self.policy(session)
        if truncate:
            policy = replace(policy, strategy="trim")
        wish = Wish("foreground", "hard", policy, parent, prompt_tokens, window, session.view_version)
        return _settled(await _outcome(self._start(session, wish)))

    async def _done(self, session: SessionRecord, *, hurry: bool = False) -> Outcome | None:
        """The end of what is on its way here; None where there is nothing, or it failed.

        In a hurry what still waits for a slot is let go; what runs asks no model any more, and prefills nothing.
        """
        ended: Outcome | None = None
        while (job := self._running.get((session.tenant_id, session.id))) is not None:
            if hurry and job.queued:
                job.task.cancel()
            elif hurry:
                job.haste.wait_for()
            task = job.task
            await asyncio.wait({task})
            ended = None if task.cancelled() or task.exception() is not None else task.result()
        return ended

    def _start(self, session: SessionRecord, wish: Wish) -> asyncio.Task[Outcome]:
        key, haste = (session.tenant_id, session.id), Haste()
        if wish.trigger == "foreground":
            haste.wait_for()
        task = asyncio.create_task(self._run(*key, wish, haste), name=f"compaction-{session.id}")
        self._running[key] = _Job(haste, task, queued=wish.trigger == "background")
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: tuple[str, str], task: asyncio.Task[Outcome]) -> None:
        if (job := self._running.get(key)) is not None and job.task is task:
            del self._running[key]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, StoreUnavailable | GatewayError):
            log.warning("a compaction was given up", session_id=key[1], reason=str(error))
        else:
            log.error("a compaction failed inside the gateway", session_id=key[1], trace=trace_of(error))

    async def _run(self, tenant_id: str, session_id: str, wish: Wish, haste: Haste) -> Outcome:
        if wish.trigger != "background":
            return await self._attempt(tenant_id, session_id, wish, haste)
        async with self._slots:
            self._running[tenant_id, session_id].queued = False
            return await self._attempt(tenant_id, session_id, wish, haste)

    async def _attempt(self, tenant_id: str, session_id: str, wish: Wish, haste: Haste) -> Outcome:
        session = await self._room.store.get_session(tenant_id, session_id)
        if session is None:
            return GONE
        if wish.view_version not in (None, session.view_version):
            return CHANGED
        taken = await self._taken(session, wish.policy or self.policy(session), wish.parent, wish.window)
        if taken is None:
            return NO_TURNS
        if wish.urgency == "auto" and (waits := await self._pause(taken)) is not None:
            return Idle(waits, "in the background it waits: the next comes when the conversation has grown")
        incoming = max(0, wish.prompt_tokens - taken.prompt_tokens)
        plan = await asyncio.to_thread(taken.plan, wish.urgency, incoming_tokens=incoming)
        if isinstance(plan, NoPlan):
            await self._note(taken, wish.trigger, plan)
            return Idle(plan.reason, plan=plan)
        try:
            began = await self._room.store.begin_compaction(self._new(taken, wish.trigger, plan.as_json()))
        except CompactionRunning:
            return Idle("running", "another gateway compacts this session now")
        except (ViewMoved, UnknownTurn, ValueError):
            return CHANGED
        if began is None:
            return GONE
        run = CompactionRun(self._room, taken, began, plan, haste=haste, incoming=incoming)
        ended = await run.to_end()
        if ended is None:
            return GONE
        self.on_ended(ended)
        return ended

    async def _taken(
        self, session: SessionRecord, policy: Policy, parent: str | None, window: int | None = None
    ) -> Snapshot | None:
        room = self._room
        return await take(
            room.store,
            room.fleet,
            room.models,
            session,
            policy,
            default_max_tokens=room.default_max_tokens,
            parent=parent,
            window=window,
        )

    async def _pause(self, taken: Snapshot) -> Pause | None:
        rows = await self._room.store.list_compactions(taken.session.tenant_id, taken.session.id, limit=LOOKED_BACK)
        tokens = {"prompt_tokens": taken.prompt_tokens, "reserve_tokens": taken.reserve_tokens}
        return pause(rows, **tokens, window=taken.window)

    async def _note(self, taken: Snapshot, trigger: Trigger, plan: NoPlan) -> None:
        """A plan that came to nothing in the background is shown. Whoever asks, or is refused, is told the numbers."""
        if plan.reason in ("off", "below_trigger") or trigger != "background":
            return
        report = {"tokens_before": plan.tokens_before, "tokens_after": plan.tokens_after}
        await self._room.store.note_compaction(self._new(taken, trigger, plan.as_json()), error=None, report=report)

    def _new(self, taken: Snapshot, trigger: Trigger, plan: Mapping[str, Any]) -> NewCompaction:
        view = taken.history.view
        return NewCompaction(
            tenant_id=taken.session.tenant_id,
            session_id=taken.session.id,
            id=self._room.new_id("cmp"),
            base_id=view.id,
            trigger=trigger,
            head_turn_id=taken.head_id,
            plan=plan,
            owner=self._room.registry.owner,
            deadline_s=DEADLINE_S,
            view_version=taken.session.view_version,
            supersedes=trigger == "foreground",
        )
