"""Which frozen segments become one, so that they never take more than their share of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from compression.budget import share
from compression.ground import LEAST_SEGMENT, Ground
from compression.segments import Segment

MERGE_SHARE = 0.65  # of the target: segments may take so much before they are merged; docs/log.md has what less loses
ROOM_SHARE = 0.6  # of what is free beside what is kept: no more than that, where it is less


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
    shown = ground.layout(segments)
    frozen = [entry if isinstance(entry, Segment) and entry in ground.segments else None for entry in shown]
    excess = sum(entry.tokens for entry in shown if isinstance(entry, Segment)) - _limit(ground, allowed)
    merges: list[Merge] = []
    made: list[Segment] = []
    gone: list[Segment] = []
    while excess > 0 and (at := _densest(frozen)) is not None:
        pair = [segment for segment in frozen[at : at + 2] if segment is not None]
        tokens = sum(segment.tokens for segment in pair)
        budget = max(LEAST_SEGMENT, tokens // 2, tokens - excess)
        if budget >= tokens:
            break
        turn_ids = tuple(id for segment in pair for id in segment.turn_ids)
        ids = tuple(segment.id for segment in pair)
        rank = max(segment.rank for segment in pair) + 1
        merges.append(Merge(ids, turn_ids, rank, budget))
        made.append(Segment(f"merged{len(merges)}", turn_ids, "", budget, "extracted", rank, merged=ids))
        gone += pair
        frozen[at : at + 2] = [None]
        excess -= tokens - budget
    return tuple(merges), (*(segment for segment in segments if segment not in gone), *made)


def _densest(frozen: Sequence[Segment | None]) -> int | None:
    """Where the two neighbours stand that have most tokens for each turn, the oldest of equals. What is new now, what
    is merged now and raw turns (None) part neighbours."""
    best, most = None, 0.0
    for at, (one, other) in enumerate(pairwise(frozen)):
        if one is None or other is None:
            continue
        density = (one.tokens + other.tokens) / (len(one.turn_ids) + len(other.turn_ids))
        if density > most:
            best, most = at, density
    return best


def _limit(ground: Ground, allowed: int) -> int:
    """Tokens that segments may take: their share of the target; down to half of it where little room is left beside
    what is kept, as a prompt that is full again at once would be compacted again at once."""
    most = MERGE_SHARE * share(ground.policy.target_ratio, ground.window)
    room = allowed - ground.overhead - sum(ground.size[id] for id in ground.kept)
    return int(max(most / 2, min(most, ROOM_SHARE * room)))
