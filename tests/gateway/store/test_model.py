"""The store against a naive model of it: begin, finish, expire, void, reopen, branch and release in any order."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass

import hypothesis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gateway.store.records import (
    HEAD,
    BeginOutcome,
    BeginTurn,
    Begun,
    Busy,
    HeadMoved,
    Known,
    LeaseLost,
    SessionChanges,
    TurnRecord,
)
from gateway.store.sessions import Store, open_store
from gateway.store.usage_records import Amount, Spender, UsageQuery, amount_of
from tests.gateway.store.conftest import Clock
from tests.gateway.store.values import SESSION, begin, finish, said, session

LEASE_S = 5.0
KEYS = (None, "k1", "k2")


@dataclass
class Turn:
    id: str
    seq: int
    parent: str | None
    key: str | None
    hash: bytes
    fence: int
    status: str = "in_progress"
    reason: str | None = None
    answers: int = 0


class Model:
    """One session, in plain lists."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.head: str | None = None
        self.fence = 0
        self.running: Turn | None = None
        self.until = 0.0
        self.next_seq = 1

    def begin(self, command: BeginTurn, now: float) -> str:
        """The kind of outcome, and the change that goes with it."""
        self.expire(now)
        known = next(
            (turn for turn in self.turns if turn.key is not None and turn.key == command.idempotency_key), None
        )
        dead = known is not None and (
            known.status == "failed" or (known.status == "incomplete" and known.reason is None)
        )
        if known is not None and (known.hash != command.request_hash or not dead):
            return "known"
        if self.running is not None:
            return "busy"
        built_on = command.expected_head if command.parent == HEAD else command.parent
        if known is not None and (command.parent != HEAD or self.head in (known.parent, known.id)):
            if built_on != known.parent:
                return "moved"
            if any(turn.parent == known.id for turn in self.turns):
                return self._new(command, built_on, known, now)
            if self.head == known.id:
                self.head = known.parent
            known.status, known.reason, known.answers = "in_progress", None, 0
            self._lease(known, now)
            return "reopened"
        if command.parent == HEAD and built_on != self.head:
            return "moved"
        return self._new(command, built_on, known, now)

    def _new(self, command: BeginTurn, built_on: str | None, known: Turn | None, now: float) -> str:
        if known is not None:
            known.key = None
        turn = Turn(command.turn_id, self.next_seq, built_on, command.idempotency_key, command.request_hash or b"", 0)
        self.next_seq += 1
        self.turns.append(turn)
        self._lease(turn, now)
        return "begun"

    def _lease(self, turn: Turn, now: float) -> None:
        self.fence += 1
        turn.fence = self.fence
        self.running, self.until = turn, now + LEASE_S

    def expire(self, now: float) -> None:
        if self.running is not None and self.until <= now:
            self.void()

    def void(self) -> None:
        if self.running is not None:
            self.running.status = "incomplete"
            self.running = None


class StoreMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.tenant = uuid.uuid4().hex  # every example has the database to itself
        self.model = Model()
        self.numbers = itertools.count()
        self.releasable = False
        self.runner = asyncio.Runner()
        self.open = AsyncExitStack()
        self.store: Store = self.runner.run(
            self.open.enter_async_context(open_store(self.url, clock=self.clock, synchronous="NORMAL"))
        )
        self.runner.run(self.store.create_session(session(tenant_id=self.tenant)))

    def teardown(self) -> None:
        self.runner.run(self.open.aclose())
        self.runner.close()

    @rule(
        key=st.sampled_from(KEYS),
        hash=st.sampled_from([b"h1", b"h1", b"h1", b"h2"]),
        parent=st.sampled_from(["head", "head", "head", "stale head", "root", "branch"]),
        pick=st.integers(0, 20),
    )
    def begin(self, key: str | None, hash: bytes, parent: str, pick: int) -> None:
        turns = self.model.turns
        chosen = turns[pick % len(turns)].id if turns else None
        where: dict[str, object] = {"parent": None}
        if parent in ("head", "stale head"):
            where = {"parent": HEAD, "head": self.model.head if parent == "head" else chosen}
        elif parent == "branch" and chosen is not None:
            where = {"parent": chosen}
        command = begin(
            f"{self.tenant}-{next(self.numbers)}",
            tenant_id=self.tenant,
            idempotency_key=key,
            request_hash=hash,
            lease_s=LEASE_S,
            key_id="tk-a",
            **where,
        )
        before = len(turns)
        expected = self.model.begin(command, self.clock.now)
        outcome = self.runner.run(self.store.begin_turn(command))
        assert kind_of(outcome) == expected
        if isinstance(outcome, Begun):
            running = self.model.running
            assert running is not None
            assert (outcome.turn_id, outcome.seq, outcome.fence) == (running.id, running.seq, running.fence)
            assert outcome.parent_id == running.parent
            self.releasable = len(turns) > before

    @precondition(lambda self: self.model.turns)
    @rule(
        pick=st.integers(0, 20),
        current=st.booleans(),
        status=st.sampled_from(["completed", "completed", "incomplete", "failed"]),
        reason=st.sampled_from([None, "length"]),
        move_head=st.booleans(),
        used=st.tuples(st.integers(0, 90), st.integers(0, 9), st.integers(0, 30)),
    )
    def finish(
        self, pick: int, current: bool, status: str, reason: str | None, move_head: bool, used: tuple[int, int, int]
    ) -> None:
        """By the holder, or by somebody who thinks to be it."""
        turns, model = self.model.turns, self.model
        turn = model.running if current and model.running else turns[pick % len(turns)]
        holds = model.running is turn and turn.fence == model.fence
        told_again = not holds and turn.status == status and status != "incomplete"
        command = finish(
            turn.id,
            turn.fence,
            tenant_id=self.tenant,
            status=status,
            finish_reason=reason,
            move_head=move_head,
            output=said("a", "assistant"),
            usage=dict(zip(("prompt_tokens", "cached_tokens", "output_tokens"), used, strict=True)),
            spender=Spender("tk-a", "small"),
        )
        try:
            self.runner.run(self.store.finish_turn(command))
        except LeaseLost:
            assert not holds
            assert not told_again
        else:
            assert holds or told_again
        if holds:
            turn.status, turn.reason, turn.answers = status, reason, 1
            model.running = None
            if move_head:
                model.head = turn.id

    @precondition(lambda self: self.model.running is not None and self.releasable)
    @rule()
    def release(self) -> None:
        turn = self.model.running
        assert turn is not None
        self.runner.run(self.store.release_turn(self.tenant, SESSION, turn.id, turn.fence))
        self.model.turns.remove(turn)
        self.model.running = None
        if turn.seq == self.model.next_seq - 1:
            self.model.next_seq -= 1

    @rule(user=st.sampled_from(["ann", "bob"]))
    def other_user(self, user: str) -> None:
        self.runner.run(self.store.update_session(self.tenant, SESSION, None, SessionChanges({"user_ref": user})))

    @rule(days=st.sampled_from([0, 3]))
    def roll_up(self, days: int) -> None:
        self.runner.run(self.store.roll_up_usage(days * 86_400.0))

    @rule(seconds=st.sampled_from([1.0, LEASE_S, 90_000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def renew(self) -> None:
        held = (self.tenant, SESSION, self.model.fence)
        lost = self.runner.run(self.store.renew_leases("gw/1", [held], LEASE_S))
        assert lost == ([] if self.model.running else [held])
        self.model.until = self.clock.now + LEASE_S

    @rule(epoch=st.sampled_from(["1", "2"]))
    def restart(self, epoch: str) -> None:
        self.runner.run(self.store.void_leases("gw", epoch))
        if epoch == "2":
            self.model.void()

    @rule()
    def sweep(self) -> None:
        self.runner.run(self.store.lapse_leases())
        self.model.expire(self.clock.now)

    @invariant()
    def same(self) -> None:
        stored = self.runner.run(self.store.list_turns(self.tenant, SESSION, limit=1000))
        assert [seen(turn) for turn in stored] == [
            (turn.id, turn.seq, turn.parent, turn.status, turn.key, turn.reason, turn.fence, 1, turn.answers)
            for turn in sorted(self.model.turns, key=lambda turn: turn.seq)
        ]
        assert self.runner.run(booked(self.store, self.tenant)) == sum((amount_of(t.usage) for t in stored), Amount())
        record = self.runner.run(self.store.get_session(self.tenant, SESSION))
        assert record is not None
        assert (record.head_turn_id, record.next_seq) == (self.model.head, self.model.next_seq)
        if record.head_turn_id is not None:
            path = self.runner.run(self.store.path(self.tenant, SESSION, record.head_turn_id))
            assert [turn.turn.parent_id for turn in path] == [None, *(turn.turn.id for turn in path[:-1])]


async def booked(store: Store, tenant: str) -> Amount:
    page = await store.usage(UsageQuery(tenant, 0, 100_000, ("key", "user", "session")))
    return sum((line.total("turn") for line in page.lines), Amount())


def kind_of(outcome: BeginOutcome) -> str:
    if isinstance(outcome, Begun):
        return "reopened" if outcome.reopened else "begun"
    return {Known: "known", Busy: "busy", HeadMoved: "moved"}.get(type(outcome), "no session")


def seen(record: TurnRecord) -> tuple[object, ...]:
    turn = record.turn
    return (
        turn.id,
        turn.seq,
        turn.parent_id,
        turn.status,
        record.idempotency_key,
        record.finish_reason,
        record.fence,
        len(turn.input),
        len(turn.output),
    )


def test_the_store_does_what_its_model_does(url: str) -> None:
    machine = type("Machine", (StoreMachine,), {"url": url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25 if url.startswith("sqlite") else 10,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            database=None,
        ),
    )
