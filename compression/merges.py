"""Which frozen segments become one of the next rank, so that they never take more than their share of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compression.ground import LEAST_SEGMENT, Ground
from compression.segments import Segment

MERGE_FAN = 4  # segments of one rank make one of the next
MERGE_SHARE = 0.5  # of the target: segments may take so much before they are merged


@dataclass(frozen=True, slots=True)
class Merge:
    segment_ids: tuple[str, ...]
    turn_ids: tuple[str, ...]
    rank: int
    budget_tokens: int


def merged(ground: Ground, segments: tuple[Segment, ...]) -> tuple[tuple[Merge, ...], tuple[Segment, ...]]:
    """While segments take more than their share, the oldest of the lowest rank that are enough in a row are merged."""
    merges: list[Merge] = []
    limit = MERGE_SHARE * ground.policy.target_ratio * ground.window
    while sum(segment.tokens for segment in segments) > limit:
        group = _mergeable(ground, segments)
        if not group:
            break
        turn_ids = tuple(id for segment in group for id in segment.turn_ids)
        budget = max(LEAST_SEGMENT, min(int(limit), sum(segment.tokens for segment in group)) // 2)
        ids = tuple(segment.id for segment in group)
        rank = max(segment.rank for segment in group) + 1
        one = Segment(f"merged{len(merges)}", turn_ids, "", budget, "extracted", rank, merged=ids)
        merges.append(Merge(ids, turn_ids, one.rank, budget))
        at = segments.index(group[0])
        segments = (*segments[:at], one, *(s for s in segments[at:] if s not in group))
    return tuple(merges), segments


def _mergeable(ground: Ground, segments: Sequence[Segment]) -> list[Segment]:
    """MERGE_FAN frozen segments of one rank in one message, the lowest rank first; where there are none, all frozen
    ones of the longest message. What is new now is left alone."""
    runs: list[list[Segment]] = [[]]
    for entry in ground.layout(segments):
        if not isinstance(entry, Segment):
            runs.append([])
        elif not entry.id.startswith(("new", "merged")):
            runs[-1].append(entry)
    for rank in sorted({segment.rank for segment in segments}):
        for run in runs:
            same = [segment for segment in run if segment.rank == rank]
            if len(same) >= MERGE_FAN:
                return same[:MERGE_FAN]
    longest = max(runs, key=len)
    return longest if len(longest) > 1 else []
