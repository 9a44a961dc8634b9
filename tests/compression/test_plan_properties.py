"""Every plan on every conversation: what it keeps, what it frees, that it ends, and that its numbers are true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compression.budget import Policy, Strategy, least_gain
from compression.conversation import Turn
from compression.plan import NoPlan, Plan, SizedPart, SizedTurn, Urgency, plan
from compression.segments import Segment
from compression.view import Cut, Part
from tests.compression.invariants import allowed_tokens, check, check_shown
from tests.compression.talks import Talk, assistant, call, output, reasoning, user

URGENCIES: tuple[Urgency, ...] = get_args(Urgency)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
WINDOWS = (256, 1024, 8192, 131072)
SHARES = (0.01, 0.02, 0.04, 0.002, 0.03, 0.015, 0.06, 0)  # of the window
RARE = (*SHARES, *SHARES, 0.3, 1.2, 8)  # giant messages too


@dataclass(frozen=True)
class Said:
    """One turn to come. Sizes are shares of the window."""

    asked: float
    answered: float | None  # None: no answer came
    calls: int = 0  # in the answer, all at once
    results: float = 0  # size of each output of the calls before
    thought: float = 0
    image: float = 0
    asks_too: bool = True  # beside the outputs that it brings


SAID = st.builds(
    Said,
    asked=st.sampled_from(RARE),
    answered=st.sampled_from((*SHARES, None, 0.3)),
    calls=st.sampled_from((0, 0, 0, 1, 3)),
    results=st.sampled_from(RARE),
    thought=st.sampled_from((0, 0, 0.004, 0.04)),
    image=st.sampled_from((0, 0, 0, 0.08)),
    asks_too=st.booleans(),
)
PLAIN = st.builds(Policy, strategy=st.sampled_from(("summarize", "summarize", "extract", "trim", "off")))
ODD = st.builds(
    Policy,
    strategy=st.sampled_from(STRATEGIES),
    trigger_ratio=st.sampled_from((0.7, 0.7, 0.7, 0.0, 0.2, 0.95, 1.0, 1.5, -1.0)),
    target_ratio=st.sampled_from((0.4, 0.4, 0.4, 0.0, 0.1, 0.9, 2.0, -0.5)),
    keep_first=st.sampled_from((1, 1, 0, 3, -2, 100)),
    keep_last=st.sampled_from((3, 3, 1, 0, 7, -1, 100)),
    tokens_per_turn=st.sampled_from((40, 40, 0, 1, 100, 5000, -3)),
)


def turn_of(id: str, said: Said, window: int, waiting: Sequence[str]) -> Turn:
    """The turn that answers the calls in `waiting`, if any."""

    def size(share: float) -> int:
        return int(share * window)

    images = [size(said.image)] if said.image else []
    brought = [output(call_id, size(said.results), *images) for call_id in waiting]
    asked = [user(size(said.asked), f"{id}u", *images)] if said.asks_too or not brought else []
    if said.answered is None:
        return Turn(id, None, 0, "failed", (*brought, *asked))
    thought = [reasoning(size(said.thought), f"{id}r")] if said.thought else []
    spoken = [assistant(size(said.answered), f"{id}a")] if said.answered or not said.calls else []
    calls = [call(f"{id}c{at}") for at in range(said.calls)]
    return Turn(id, None, 0, "completed", (*brought, *asked), (*thought, *spoken, *calls))


def waiting_of(turns: Sequence[Turn]) -> list[str]:
    return [item.payload["call_id"] for item in turns[-1].output if item.type == "function_call"] if turns else []


class Session(RuleBasedStateMachine):
    """A session lives: it says, compacts, is pinned, branches. What is shown of it holds after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.named = 0

    @initialize(
        window=st.sampled_from(WINDOWS),
        overhead=st.sampled_from((0, 0.05, 0.02, 0.1, 0.3, 0.69, 0.99, 1.5)),
        reserve=st.sampled_from((0.06, 0, 0.25)),
        policy=PLAIN | PLAIN | ODD,
        said=st.lists(SAID, min_size=4, max_size=16),
    )
    def begin(self, window: int, overhead: float, reserve: float, policy: Policy, said: list[Said]) -> None:
        self.talk = Talk(window, int(overhead * window), int(reserve * window), policy)
        self.say(said)

    @rule(said=st.lists(SAID, min_size=1, max_size=6))
    def say(self, said: list[Said]) -> None:
        for each in said:
            self.named += 1
            turns = self.talk.turns
            turns.append(turn_of(f"t{self.named}", each, self.talk.window, waiting_of(turns)))

    @rule(turns=st.integers(5, 20))
    def chat(self, turns: int) -> None:
        self.say([Said(0.01, 0.025)] * turns)

    @rule(urgency=st.sampled_from(("auto", *URGENCIES)), fill=st.sampled_from((1.0, 1.0, 0.5, 0.0)))
    def compact(self, urgency: Urgency, fill: float) -> None:
        made = self.talk.plan(urgency)
        check(self.talk, made, urgency)
        if isinstance(made, NoPlan):
            return
        self.talk.carry_out(made, lambda budget: int(fill * budget))
        again = self.talk.plan(urgency)
        check(self.talk, again, urgency)
        if isinstance(again, Plan):  # summaries shorter than planned bring the last resort within reach
            assert (urgency, fill < 1.0, again.ranges, again.merges) == ("asked", True, (), ()), "a plan after a plan"
            self.talk.carry_out(again)
            again = self.talk.plan(urgency)
        assert isinstance(again, NoPlan)
        past = urgency == "auto" and made.tokens_after > allowed_tokens(self.talk, urgency, self.talk.policy)
        assert urgency == "asked" or past or again.reason == "below_trigger"

    @rule(urgency=st.sampled_from(URGENCIES), policy=PLAIN | ODD)
    def look(self, urgency: Urgency, policy: Policy) -> None:
        check(self.talk, self.talk.plan(urgency, policy), urgency, policy)

    @precondition(lambda self: self.talk.turns)
    @rule(at=st.integers(0, 10**6))
    def pin(self, at: int) -> None:
        self.talk.pinned.add(self.talk.turns[at % len(self.talk.turns)].id)

    @precondition(lambda self: self.talk.pinned)
    @rule(at=st.integers(0, 10**6))
    def unpin(self, at: int) -> None:
        self.talk.pinned.discard(sorted(self.talk.pinned)[at % len(self.talk.pinned)])

    @precondition(lambda self: self.talk.turns)
    @rule(at=st.integers(0, 10**6))
    def branch(self, at: int) -> None:
        """The path goes on from an earlier turn; the view stays, and what it covers may end amid a segment."""
        del self.talk.turns[1 + at % len(self.talk.turns) :]

    @invariant()
    def stands(self) -> None:
        if hasattr(self, "talk"):
            check_shown(self.talk, self.talk.view)


Session.TestCase.settings = settings(max_examples=40, stateful_step_count=24, deadline=None)
TestSession = Session.TestCase


PARTS = st.builds(
    SizedPart,
    part=st.sampled_from(get_args(Part)),
    index=st.integers(0, 3),
    tokens=st.integers(0, 5000),
    kind=st.none() | st.sampled_from(get_args(Cut)),
    stays_tokens=st.integers(0, 100),
)
SIZED = st.builds(
    SizedTurn,
    id=st.just(""),
    tokens=st.integers(0, 9000),
    pinned=st.sampled_from((False, False, False, True)),
    open_calls=st.sampled_from((False, False, True)),
    parts=st.lists(PARTS, max_size=4).map(tuple),
)
SEGMENTS = st.lists(
    st.builds(
        Segment,
        id=st.sampled_from(("s", "new0", "merged1", "merged2", "v1s0")),
        turn_ids=st.lists(st.integers(0, 30).map(lambda at: f"t{at}"), max_size=6).map(tuple),
        text=st.just("x"),
        tokens=st.integers(0, 900),
        source=st.just("model"),
        rank=st.integers(0, 3),
    ),
    max_size=8,
)


@given(
    turns=st.lists(SIZED, max_size=30),
    segments=SEGMENTS,
    window=st.sampled_from((16384, 4096, 131072, 256, 1)),
    reserve=st.integers(0, 5000),
    overhead=st.sampled_from((0, 50, 400, 3000, 200_000)),
    policy=PLAIN | ODD,
    urgency=st.sampled_from(URGENCIES),
    frame=st.sampled_from((0, 48, 300)),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_is_made_or_refused_whatever_it_is_given(
    turns: list[SizedTurn],
    segments: list[Segment],
    window: int,
    reserve: int,
    overhead: int,
    policy: Policy,
    urgency: Urgency,
    frame: int,
) -> None:
    """Parts that do not add up, segments that overlap, tell of turns elsewhere or have a placeholder's name."""
    named = [replace(turn, id=f"t{at}") for at, turn in enumerate(turns)]
    made = plan(
        named,
        segments,
        window=window,
        reserve_tokens=reserve,
        overhead_tokens=overhead,
        policy=policy,
        urgency=urgency,
        frame_tokens=frame,
    )
    assert 0 <= made.tokens_after <= made.tokens_before
    assert all(option.tokens_after >= 0 and option.reprefill_tokens >= 0 for option in made.options)
    if isinstance(made, Plan):
        assert made.tokens_before - made.tokens_after >= (1 if urgency == "hard" else least_gain(window))
        assert 0 <= made.first_changed <= made.tokens_before
        assert all(each.budget_tokens >= 0 for each in (*made.ranges, *made.merges, *made.cuts))
        assert {id for merge in made.merges for id in merge.segment_ids} <= {segment.id for segment in segments}
        keys = [(cut.turn_id, cut.part, cut.index) for cut in made.cuts]
        assert len(set(keys)) == len(keys)
