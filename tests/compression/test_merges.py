"""Which segments become one, when they take too much."""

from __future__ import annotations

from compression.budget import Policy
from compression.merges import MERGE_SHARE, ROOM_SHARE
from compression.plan import Merge
from compression.segments import Segment
from tests.compression.test_plan import ALLOWED, TARGET, ids, made, segment, turns

LIMIT = int(MERGE_SHARE * TARGET)


def old(*tokens: int) -> tuple[Segment, ...]:
    """Segments of two turns each, from t2 on."""
    return tuple(segment(f"s{at}", each, *ids(2 * at + 2, 2 * at + 3)) for at, each in enumerate(tokens))


def test_segments_are_merged_when_they_take_more_than_their_share() -> None:
    path = turns(1, 19)
    fewer = made(path, old(500, 500, 200))
    assert 1200 + fewer.summary_budget <= LIMIT
    assert fewer.merges == ()
    plan = made(path, old(600, 650, 650))
    excess = 1900 + plan.summary_budget - LIMIT
    assert plan.merges == (Merge(("s1", "s2"), ids(4, 7), 1, 1300 - excess),)
    assert plan.first_changed == 300 + 300 + 600, "what stands before them stays"


def test_those_with_most_tokens_a_turn_are_merged_and_by_half_at_most() -> None:
    thin = segment("s0", 1000, *ids(2, 9), rank=3)
    thick = (segment("s1", 600, *ids(10, 11)), segment("s2", 700, *ids(12, 13), rank=1))
    plan = made(turns(1, 30), (thin, *thick))
    assert 1000 + 1300 + plan.summary_budget - LIMIT > 650
    assert plan.merges == (Merge(("s1", "s2"), ids(10, 13), 2, 650),), "never what was made or merged right now"


def test_what_a_pin_parts_is_not_merged() -> None:
    path = [*turns(1, 3), *turns(4, 4, pinned=True), *turns(5, 30)]
    assert made(path, (segment("s0", 1000, "t2", "t3"), segment("s1", 1000, "t5", "t6"))).merges == ()
    assert made(turns(1, 30), (segment("s0", 1000, "t2", "t3"), segment("s1", 1000, "t4", "t5"))).merges != ()


def test_segments_are_merged_sooner_where_overhead_leaves_little_room() -> None:
    assert made(turns(1, 13), old(500, 500), overhead_tokens=1500).merges == ()
    assert made(turns(1, 10), old(500, 500), overhead_tokens=2600).merges != ()


def test_where_no_turn_may_go_segments_are_merged_alone() -> None:
    plan = made(turns(1, 8), old(1400, 1400), overhead_tokens=1300)
    assert (plan.way, plan.ranges, plan.cuts) == ("summarize", (), ())
    assert plan.merges == (Merge(("s0", "s1"), ids(2, 5), 1, int(ROOM_SHARE * (ALLOWED - 1300 - 1200))),)
    assert plan.options[-1].call_tokens == 0


def test_what_would_not_become_shorter_is_not_merged() -> None:
    plan = made(
        turns(1, 12, 100),
        old(12, 12),
        window=1024,
        reserve_tokens=0,
        overhead_tokens=0,
        policy=Policy(target_ratio=0.0),
    )
    assert plan.ranges != ()
    assert plan.merges == ()
