"""Which parts of turns are cut out: images first, then reasoning and tool outputs, then long messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compression.ground import MARKER_TOKENS, Ground, SizedPart
from compression.segments import Segment
from compression.view import Cut, Part

OVERSIZED = 0.125  # of the window: a message longer than that may be cut in its middle
CUT_SHARE = 4  # an oversized message keeps a quarter, and is not oversized any more
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
    ground: Ground, segments: Sequence[Segment], goal: int, *, kept_down_to: int | None
) -> tuple[tuple[PlannedCut, ...], dict[str, int]]:
    """Cuts, and the sizes of the turns that they shorten.

    Down to the goal in turns that are not kept; in those that are, down to another, or not at all (None). One cut for
    an item at most.
    """
    cuts: dict[tuple[str, Part, int], PlannedCut] = {}
    sizes: dict[str, int] = {}
    tokens = ground.tokens(segments, sizes)
    for cut in _cuttable(ground, segments):
        item = (cut.turn_id, cut.part, cut.index)
        down_to = kept_down_to if cut.turn_id in ground.kept else goal
        if down_to is None or tokens <= down_to or item in cuts:
            continue
        size = sizes.get(cut.turn_id, ground.size[cut.turn_id])
        sizes[cut.turn_id] = max(0, size - cut.tokens + cut.budget_tokens)
        tokens -= size - sizes[cut.turn_id]
        cuts[item] = cut
    return tuple(cuts.values()), sizes


_ORDER: dict[Cut, int] = {"image": 0, "reasoning": 1, "tool_output": 2, "oversized": 3}


def _cuttable(ground: Ground, segments: Sequence[Segment]) -> list[PlannedCut]:
    """What may be cut out: of turns that are kept last, then by kind, then oldest first."""
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
    longest = int(OVERSIZED * window)
    if kind == "oversized":
        return min(part.tokens // CUT_SHARE, longest) if part.tokens > longest else None
    if kind == "tool_output":
        return MASK_TOKENS if part.tokens >= MASKED_TOOL else None
    left = part.stays_tokens + MARKER_TOKENS if kind == "image" else 0
    return left if part.tokens > left else None
