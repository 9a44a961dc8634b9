"""Which frozen segments become one, so that they never take more than their share of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from compression.budget import share
from compression.ground import LEAST_SEGMENT, Ground
from compression.segments import Segment

MERGE_SHARE = 0.6  # of the target: segments may take so much before they are merged; half lost 1.5 times the facts


@dataclass(frozen=True, slots=True)
class Merge:
    segment_ids: tuple[str, ...]
    turn_ids: tuple[str, ...]
    rank: int
    budget_tokens: int


def merged(
    ground: Ground, segments: tuple[Segment, ...], allowed: int
) -> tuple[tuple[Merge, ...], tuple[Segment, ...]]:
    """While segments take more than their share, neighbours are merged: by what is too much, and at most to half.

    Those go first that have most tokens for each turn they stand for: no part of the past fades before the rest.
    """
    merges: list[Merge] = []
    limit = _limit(ground, allowed)
    while (excess := _tokens(ground, segments) - limit) > 0:
        pair = max(_neighbours(ground, segments), key=_density, default=())
        tokens = sum(segment.tokens for segment in pair)
        budget = max(LEAST_SEGMENT, tokens // 2, tokens - excess)
        if budget >= tokens:
            break
        turn_ids = tuple(id for segment in pair for id in segment.turn_ids)
        ids = tuple(segment.id for segment in pair)
        rank = max(segment.rank for segment in pair) + 1
        merges.append(Merge(ids, turn_ids, rank, budget))
        one = Segment(f"merged{len(merges)}", turn_ids, "", budget, "extracted", rank, merged=ids)
        at = segments.index(pair[0])
        segments = (*segments[:at], one, *(segment for segment in segments[at:] if segment not in pair))
    return tuple(merges), segments


def _limit(ground: Ground, allowed: int) -> int:
    """Tokens that segments may take: their share of the target; down to half of it where little room is left beside
    what is kept, as a prompt that is full again at once would be compacted again at once."""
    most = MERGE_SHARE * share(ground.policy.target_ratio, ground.window)
    room = allowed - ground.overhead - sum(ground.size[id] for id in ground.kept)
    return int(max(most / 2, min(most, MERGE_SHARE * room)))


def _tokens(ground: Ground, segments: Sequence[Segment]) -> int:
    return sum(entry.tokens for entry in ground.layout(segments) if isinstance(entry, Segment))


def _density(pair: tuple[Segment, ...]) -> float:
    return sum(segment.tokens for segment in pair) / sum(len(segment.turn_ids) for segment in pair)


def _neighbours(ground: Ground, segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Frozen segments, two and two, that stand next to each other in one message. What is new now is left alone."""
    return [
        (one, next)
        for one, next in pairwise(ground.layout(segments))
        if isinstance(one, Segment) and isinstance(next, Segment) and one in ground.segments and next in ground.segments
    ]
