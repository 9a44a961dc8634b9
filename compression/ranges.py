"""Which turns in a row new segments replace, and how long those may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compression.budget import MOST_PER_TURN, share
from compression.conversation import Turn
from compression.ground import LEAST_SEGMENT, MARKER_TOKENS, Ground, SizedTurn, Unit
from compression.merges import MERGE_SHARE
from compression.segments import Segment

FRESH = 1.5  # times its fair share of what segments may take: the recent past in more detail than the rest


@dataclass(frozen=True, slots=True)
class Range:
    """Turns in a row that one new segment replaces."""

    turn_ids: tuple[str, ...]
    source_tokens: int
    budget_tokens: int

    def of(self, path: Sequence[Turn]) -> list[Turn]:
        """Its turns, of a path that holds them."""
        mine = frozenset(self.turn_ids)
        return [turn for turn in path if turn.id in mine]


def ranges_down_to(ground: Ground, goal: int) -> tuple[Range, ...]:
    """As few of the oldest units as bring the prompt to the goal, or all."""
    units = ground.units
    low, high = min(1, len(units)), len(units)
    while low < high:
        middle = (low + high) // 2
        if ground.tokens(with_new(ground, _ranges(ground, units[:middle])), {}) <= goal:
            high = middle
        else:
            low = middle + 1
    return _ranges(ground, units[:low])


def with_new(ground: Ground, ranges: Sequence[Range]) -> tuple[Segment, ...]:
    """The segments as they are, and one for each range, as long as it may be."""
    new = (
        Segment(f"new{at}", each.turn_ids, "", each.budget_tokens, "extracted", source_tokens=each.source_tokens)
        for at, each in enumerate(ranges)
    )
    return (*ground.segments, *new)


def _ranges(ground: Ground, units: Sequence[Unit]) -> tuple[Range, ...]:
    """Units in a row make one range; one that a frame would outweigh stays."""
    place = {id: at for at, id in enumerate(ground.ids)}
    groups: list[list[SizedTurn]] = []
    for unit in units:
        if groups and place[groups[-1][-1].id] + 1 == place[unit[0].id]:
            groups[-1] += unit
        else:
            groups.append(list(unit))
    ranges = []
    for group in groups:
        source, budget = sum(turn.tokens for turn in group), _budget(ground, group)
        if source > budget + ground.frame:
            ranges.append(Range(tuple(turn.id for turn in group), source, budget))
    return tuple(ranges)


def _budget(ground: Ground, turns: Sequence[SizedTurn]) -> int:
    """So many tokens for each turn, at most half of its own: to replace one turn more never makes a prompt longer.

    Past what segments may take in all, a new one gets no more than its share: else the rest is squeezed for it.
    """
    policy = ground.policy
    if policy.strategy in ("trim", "off"):
        return MARKER_TOKENS
    replaced = len(turns) + sum(len(segment.turn_ids) for segment in ground.segments)
    fair = FRESH * MERGE_SHARE * share(policy.target_ratio, ground.window) / replaced
    most = min(policy.tokens_per_turn, MOST_PER_TURN, max(8, int(fair)))
    return max(LEAST_SEGMENT, sum(min(most, turn.tokens // 2) for turn in turns))
