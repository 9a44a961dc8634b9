"""Compactions, reverts and pins in any order among turns of several branches, against a naive model of them."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import hypothesis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.store.compaction_records import CompactionOver, CompactionRecord, CompactionRunning, ViewMoved
from gateway.store.records import Begun, HeadMoved
from gateway.store.sessions import Store, open_store
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import OWNER, SESSION, begin, committing, compaction, finish, session

DEADLINE_S = 3.0
STEP_S = 2.0


class Attempt:
    """A row of `compactions`."""

    def __init__(self, id: str, base: str | None, expected: int, deadline: float) -> None:
        self.id, self.base, self.expected, self.deadline = id, base, expected, deadline
        self.status, self.anchor = "running", ""


class CompactionMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.tenant = uuid.uuid4().hex  # every example has the database to itself
        self.numbers = itertools.count()
        self.runner = asyncio.Runner()
        self.open = AsyncExitStack()
        opened = open_store(self.url, clock=self.clock, synchronous="NORMAL")
        self.store: Store = self.runner.run(self.open.enter_async_context(opened))
        self.parents: dict[str, str | None] = {}
        self.head: str | None = None
        self.unanswered: Begun | None = None  # a turn that runs
        self.attempts: list[Attempt] = []
        self.view = 0
        self.pinned: set[str] = set()

    def teardown(self) -> None:
        try:
            self.same_everywhere()
        finally:
            self.runner.run(self.open.aclose())
            self.runner.close()

    @initialize()
    def first(self) -> None:
        self.runner.run(self.store.create_session(session(tenant_id=self.tenant)))
        for _ in range(3):
            self.ask(0)
            self.answer()

    @precondition(lambda self: self.unanswered is None)
    @rule(up=st.sampled_from([0, 0, 0, 1, 2]))
    def ask(self, up: int) -> None:
        """At the head, or as a branch from further up. Whatever is compacted meanwhile, the turn goes on."""
        parent = (self.path(self.head)[::-1] + [None] * 3)[up]
        turn_id = f"{self.tenant}-{next(self.numbers)}"
        command = begin(turn_id, tenant_id=self.tenant, parent=parent, lease_s=120.0, expected_view=self.view)
        begun = self.runner.run(self.store.begin_turn(command))
        assert isinstance(begun, Begun)
        self.unanswered, self.parents[turn_id] = begun, parent

    @precondition(lambda self: self.unanswered is not None)
    @rule()
    def answer(self) -> None:
        begun = self.unanswered
        assert begun is not None
        self.runner.run(self.store.finish_turn(finish(begun.turn_id, begun.fence, tenant_id=self.tenant)))
        self.unanswered, self.head = None, begun.turn_id

    def running(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.status == "running"), None)

    def path(self, turn_id: str | None) -> list[str]:
        """From the root down."""
        found: list[str] = []
        while turn_id is not None:
            found.append(turn_id)
            turn_id = self.parents[turn_id]
        return found[::-1]

    def standing(self, turn_id: str) -> Attempt | None:
        for each in reversed(self.path(turn_id)):
            at = [one for one in self.attempts if one.status == "committed" and one.anchor == each]
            if at:
                return at[-1]
        return None

    def outcome(self, call: Coroutine[Any, Any, object]) -> object:
        """What it returns, or the refusal that it raises."""
        try:
            return self.runner.run(call)
        except (CompactionRunning, CompactionOver, ViewMoved, ValueError) as refused:
            return refused

    @rule(stale=st.sampled_from([0, 0, 0, 1]))
    def compact(self, stale: int) -> None:
        head, now, before = str(self.head), self.clock.now, self.running()
        base, expected = self.standing(head), self.view + stale
        id = f"c-{self.tenant}-{next(self.numbers)}"
        new = compaction(
            id, head, expected, base and base.id, tenant_id=self.tenant, owner=OWNER, deadline_s=DEADLINE_S
        )
        outcome = self.outcome(self.store.begin_compaction(new))
        if before is not None and before.deadline > now:
            assert isinstance(outcome, CompactionRunning)
            assert (outcome.id, outcome.until) == (before.id, before.deadline)
        elif stale:
            assert isinstance(outcome, ViewMoved)
            assert outcome.current == self.view
        else:
            assert isinstance(outcome, CompactionRecord)
            assert outcome.number == len(self.attempts) + 1
            if before is not None:
                before.status = "failed"
            self.attempts.append(Attempt(id, base and base.id, expected, now + DEADLINE_S))

    @precondition(lambda self: self.attempts)
    @rule(pick=st.sampled_from([0, 0, 0, 1]), up=st.integers(0, 3))
    def commit(self, pick: int, up: int) -> None:
        attempt = self.attempts[-1 - pick % len(self.attempts)]
        base = next((one for one in self.attempts if one.id == attempt.base), None)
        path = self.path(self.head)
        lowest = path.index(base.anchor) if base is not None and base.anchor in path else 0
        anchor = path[max(lowest, len(path) - 1 - up)]
        told = committing(anchor, attempt.expected, view={"of": attempt.id})
        outcome = self.outcome(self.store.commit_compaction(self.tenant, SESSION, attempt.id, **told))
        if attempt.status == "committed" and attempt.anchor == anchor:
            assert outcome == attempt.expected + 1  # said again
        elif attempt.status != "running":
            assert isinstance(outcome, CompactionOver)
            assert outcome.status == attempt.status
        elif attempt.expected != self.view:
            assert isinstance(outcome, ViewMoved)
            assert outcome.current == self.view
        else:
            self.view += 1
            assert outcome == self.view
            attempt.status, attempt.anchor = "committed", anchor

    @precondition(lambda self: self.attempts)
    @rule(pick=st.integers(0, 20), status=st.sampled_from(["failed", "skipped"]))
    def end(self, pick: int, status: str) -> None:
        attempt = self.attempts[pick % len(self.attempts)]
        ended = {"status": status, "error": None, "report": {}}
        self.runner.run(self.store.end_compaction(self.tenant, SESSION, attempt.id, **ended))
        if attempt.status == "running":
            attempt.status = status

    @precondition(lambda self: self.running() is None)
    @rule(up=st.integers(0, 3), again=st.booleans())
    def compact_at_once(self, up: int, again: bool) -> None:
        for _ in range(1 + again):
            self.compact(stale=0)
            self.commit(pick=0, up=up)

    @precondition(lambda self: self.attempts)
    @rule(pick=st.integers(0, 20), committed=st.sampled_from([True, True, False]))
    def revert(self, pick: int, committed: bool) -> None:
        chosen = [one for one in self.attempts if not committed or one.status == "committed"] or self.attempts
        attempt = chosen[pick % len(chosen)]
        outcome = self.outcome(self.store.revert_compaction(self.tenant, SESSION, attempt.id))
        if attempt.status != "committed":
            assert isinstance(outcome, ValueError)
            return
        assert isinstance(outcome, CompactionRecord)
        self.view += 1
        fallen = {attempt.id}
        for one in self.attempts:
            if one.id == attempt.id or (one.base in fallen and one.status == "committed"):
                fallen.add(one.id)
                one.status = "reverted"

    @rule(pick=st.integers(0, 20), pinned=st.booleans())
    def pin(self, pick: int, pinned: bool) -> None:
        turn_id = list(self.parents)[pick % len(self.parents)]
        record = self.runner.run(self.store.pin_turn(self.tenant, SESSION, turn_id, pinned))
        assert record is not None
        assert record.pinned is pinned
        if pinned != (turn_id in self.pinned):
            self.view += 1
            self.pinned ^= {turn_id}

    @precondition(lambda self: self.unanswered is None and self.view > 0)
    @rule()
    def begin_through_an_older_view(self) -> None:
        command = begin("never", self.head, tenant_id=self.tenant, expected_view=self.view - 1)
        assert self.runner.run(self.store.begin_turn(command)) == HeadMoved(self.head)

    @rule()
    def wait(self) -> None:
        self.clock.now += STEP_S

    @precondition(lambda self: self.unanswered is None)
    @rule(epoch=st.sampled_from(["1", "1", "2"]))
    def restart(self, epoch: str) -> None:
        self.runner.run(self.store.void_leases("gw", epoch))
        if epoch == "2" and (attempt := self.running()) is not None:
            attempt.status = "failed"

    @rule()
    def sweep_compactions(self) -> None:
        attempt = self.running()
        self.runner.run(self.store.lapse_compactions())
        if attempt is not None and attempt.deadline <= self.clock.now:
            attempt.status = "failed"

    @invariant()
    def same_at_the_head(self) -> None:
        if self.head is not None:
            self.same(self.head)

    def same(self, turn_id: str) -> None:
        found = self.runner.run(self.store.view_of(self.tenant, SESSION, turn_id))
        expected = self.standing(turn_id)
        assert (found.compaction and found.compaction.id) == (expected and expected.id)
        assert (found.pinned, found.view_version) == (self.pinned, self.view)

    def same_everywhere(self) -> None:
        for turn_id in self.parents:
            self.same(turn_id)
        rows = self.runner.run(self.store.list_compactions(self.tenant, SESSION, limit=1000))
        assert [(row.id, row.status, row.base_id) for row in reversed(rows)] == [
            (attempt.id, attempt.status, attempt.base) for attempt in self.attempts
        ]


def test_compactions_among_turns_do_what_their_model_does(url: str) -> None:
    machine = type("Machine", (CompactionMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25 if url.startswith("sqlite") else 8,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        ),
    )
