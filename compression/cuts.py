"""Which parts of turns are cut out: images first, then reasoning and tool outputs, then long messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compression.ground import MARKER_TOKENS, Ground, SizedPart
from compression.segments import Segment
from compression.view import Cut, Part

OVERSIZED = 0.125  # of the window: a message longer than that may be cut in its middle
CUT_SHARE = 4  # an oversized message keeps a quarter
MASK_TOKENS = 24  # "[tool output of 812 tokens left out]"
MASKED_TOOL = 64  # tokens: a shorter tool output is not worth a marker


@dataclass(frozen=True, slots=True)
class PlannedCut:
    turn_id: str
    part: Part
    index: int
    kind: Cut
    tokens: int
    budget_tokens: int


def cuts_down_to(
    ground: Ground, segments: Sequence[Segment], goal: int, allowed: int
) -> tuple[tuple[PlannedCut, ...], dict[str, int]]:
    """Cuts, and the sizes of the turns that they shorten.

    Down to the goal in turns that may be replaced; in those that are kept only what is needed to be allowed.
    """
    cuts: list[PlannedCut] = []
    sizes: dict[str, int] = {}
    tokens = ground.tokens(segments, sizes)
    for cut in _cuttable(ground, segments):
        if tokens <= (allowed if cut.turn_id in ground.kept else goal):
            continue
        cuts.append(cut)
        sizes[cut.turn_id] = sizes.get(cut.turn_id, ground.size[cut.turn_id]) - cut.tokens + cut.budget_tokens
        tokens -= cut.tokens - cut.budget_tokens
    return tuple(cuts), sizes


_ORDER: dict[Cut, int] = {"image": 0, "reasoning": 1, "tool_output": 2, "oversized": 3}


def _cuttable(ground: Ground, segments: Sequence[Segment]) -> list[PlannedCut]:
    """What may be cut out: of turns that may be replaced first, then by kind, then oldest first."""
    hidden = ground.covered(segments) | ground.pinned
    found = [
        PlannedCut(turn.id, part.part, part.index, part.kind, part.tokens, budget)
        for turn in ground.turns
        if turn.id not in hidden
        for part in turn.parts
        if part.kind is not None and (budget := _cut_budget(part, part.kind, ground.window)) is not None
    ]
    return sorted(found, key=lambda cut: (cut.turn_id in ground.kept, _ORDER[cut.kind]))


def _cut_budget(part: SizedPart, kind: Cut, window: int) -> int | None:
    """Tokens that are left of a part after its cut; None where that is not worth it."""
    if kind == "oversized":
        return part.tokens // CUT_SHARE if part.tokens > OVERSIZED * window else None
    if kind == "reasoning":
        return 0
    if kind == "tool_output":
        return MASK_TOKENS if part.tokens >= MASKED_TOOL else None
    return MARKER_TOKENS if part.tokens > MARKER_TOKENS else None
