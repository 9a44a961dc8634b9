"""Conversations of 300 turns: how often they are compacted, at any fixed overhead, and what becomes of old turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from compression.budget import Policy, least_gain
from compression.merges import MERGE_SHARE
from compression.plan import NoPlan, Plan
from compression.segments import Segment
from tests.compression.invariants import check, check_shown
from tests.compression.talks import Talk, exchange

TURNS = 300
OVERHEADS = (0.0, 0.1, 0.3, 0.69, 0.71, 1.0)


@dataclass
class Lived:
    """What became of a conversation that was compacted after a turn, or before one that would not fit."""

    talk: Talk
    background: list[int] = field(default_factory=list)  # turns after which
    foreground: list[int] = field(default_factory=list)
    vain: list[NoPlan] = field(default_factory=list)
    refused: int = 0
    taken: int = 0  # tokens of all turns that were not refused

    @property
    def gaps(self) -> list[int]:
        return [after - before for before, after in pairwise(self.background)]


def lived(window: int, overhead: float, turn: float, seed: int = 0) -> Lived:
    """Turns of `turn` of the window, give or take nine tenths of that."""
    random = Random(seed)
    life = Lived(Talk(window, int(overhead * window), window // 16))
    talk = life.talk
    for number in range(TURNS):
        tokens = int(turn * window * random.uniform(0.1, 1.9))
        talk.turns.append(exchange(f"t{number}", tokens // 4, tokens - tokens // 4))
        if talk.tokens + window // 16 > window:
            made = talk.plan("hard")
            if isinstance(made, Plan):
                life.foreground.append(number)
                talk.carry_out(made)
            elif talk.tokens >= window:
                life.refused += 1
                talk.turns.pop()
                continue
        life.taken += tokens
        made = talk.plan()
        if isinstance(made, Plan):
            life.background.append(number)
            talk.carry_out(made)
        elif made.reason != "below_trigger":
            life.vain.append(made)
    return life


@pytest.mark.parametrize("overhead", OVERHEADS)
@pytest.mark.parametrize(("window", "turn"), [(1024, 0.05), pytest.param(16384, 0.03, marks=pytest.mark.prove)])
def test_no_fixed_overhead_makes_it_loop(window: int, turn: float, overhead: float) -> None:
    """Each compaction frees a twentieth of the window of what turns brought, so their number is bounded by that; and
    where nothing can be freed, nothing is done, at a price of one plan a turn."""
    life = lived(window, overhead, turn)
    assert len(life.background) <= life.taken / least_gain(window)
    assert len(life.foreground) + life.refused <= TURNS
    check_shown(life.talk, life.talk.view)
    if overhead >= 1.0:
        assert (life.background, life.foreground, life.refused) == ([], [], TURNS)
        assert life.vain == []
    if overhead <= 0.3:
        assert life.refused == 0
    if overhead <= 0.1:
        assert life.foreground == [], "all of it in the background"


@pytest.mark.parametrize(("window", "turn", "gap"), [(8192, 0.01, 15), (8192, 0.035, 4), (131072, 0.02, 9)])
def test_an_ordinary_conversation_is_compacted_every_few_turns_at_most(window: int, turn: float, gap: int) -> None:
    life = lived(window, 0.05, turn, seed=1)
    assert life.foreground == []
    assert life.refused == 0
    assert life.vain == []
    mean = sum(life.gaps) / len(life.gaps)
    assert mean >= gap, f"every {mean:.1f} turns"


def test_a_compaction_that_reaches_its_target_lasts_until_the_room_is_used_up() -> None:
    life = lived(8192, 0.05, 0.035)
    room = 0.70 * 8192 - 512 - 0.40 * 8192
    assert min(life.gaps) >= room // (0.035 * 8192 * 1.9)


def test_old_turns_fade_alike_and_summaries_keep_to_their_share() -> None:
    talk = Talk(8192, 300, 512)
    left: dict[str, float] = {}
    for number in range(TURNS):
        talk.turns.append(exchange(f"t{number}"))
        made = talk.plan()
        if isinstance(made, NoPlan):
            continue
        by_id = {segment.id: segment for segment in talk.view.segments}
        for merge in made.merges:
            kept = merge.budget_tokens / sum(by_id[id].tokens for id in merge.segment_ids)
            left |= {id: left[id] * kept for id in merge.turn_ids}
        left |= {id: 1.0 for each in made.ranges for id in each.turn_ids}
        talk.carry_out(made)
        segments = [entry for entry in talk.shown if isinstance(entry, Segment)]
        assert sum(segment.tokens for segment in segments) <= MERGE_SHARE * 0.4 * 8192
    ordered = [left[f"t{number}"] for number in range(1, TURNS) if f"t{number}" in left]
    third = len(ordered) // 3
    oldest, middle = (sum(part) / third for part in (ordered[:third], ordered[third : 2 * third]))
    assert oldest > middle / 4, "the first turns are not forgotten for those after them"


@pytest.mark.parametrize("strategy", ["summarize", "extract", "trim"])
def test_every_plan_of_a_long_conversation_holds(strategy: str) -> None:
    random = Random(1)
    talk = Talk(4096, 400, 256, Policy(strategy=strategy))  # type: ignore[arg-type]
    plans = 0
    for number in range(120):
        talk.turns.append(exchange(f"t{number}", random.randint(1, 100), random.randint(1, 300)))
        if random.random() < 0.02:
            talk.pinned.add(f"t{random.randint(0, number)}")
        made = talk.plan()
        check(talk, made, "auto")
        if isinstance(made, Plan):
            plans += 1
            talk.carry_out(made, lambda budget: random.randint(budget // 2, budget))
    assert plans > 10
