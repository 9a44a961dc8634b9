"""Plans a compaction: which turns a summary replaces, which segments are merged, which parts are cut out. Pure.

    prompt   | overhead | t1 | s1 s2 | t5 t6 t7 | t8 (pinned) | t9 | t10 t11 t12 |
    kept       system     first        ...         pins                last 3
    plan     | overhead | t1 | s1 s2 s3(t5..t7) | t8 | s4(t9) | t10 t11 t12 |

Whole units only: a turn whose tool calls the next turn answers is one unit with it. A plan shrinks the prompt by the
least gain at least, and brings it below the trigger; what cannot is a NoPlan with the numbers, so nothing loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from compression.budget import Policy, Strategy, least_gain
from compression.cost import Option, cheapest, expected_turns, price
from compression.segments import Segment
from compression.view import Cut, Part, layout

FRAME_TOKENS = 48  # around the segments of one summary message: heading, ending, roles, what is said to it
LEAST_SEGMENT = 24  # tokens; a shorter summary says nothing
MARKER_TOKENS = 12  # "[n earlier turns were removed]"
MERGE_FAN = 4  # segments of one rank make one of the next
MERGE_SHARE = 0.5  # of the target: segments may take so much before they are merged
OVERSIZED = 0.125  # of the window: a message longer than that may be cut in its middle
CUT_SHARE = 4  # an oversized message keeps a quarter
MASK_TOKENS = 24  # "[tool output of 812 tokens left out]"
MASKED_TOOL = 64  # tokens: a shorter tool output is not worth a marker


@dataclass(frozen=True, slots=True)
class SizedPart:
    """One item of a turn as it stands in the prompt now. `kind` None: nothing that is ever cut out."""

    part: Part
    index: int
    tokens: int
    kind: Cut | None = None


@dataclass(frozen=True, slots=True)
class SizedTurn:
    """`tokens`: of the whole turn as it is rendered raw, less what elisions took. `open_calls`: tool calls that are
    unanswered at its end, so that the next turn belongs to it."""

    id: str
    tokens: int
    pinned: bool = False
    open_calls: bool = False
    parts: tuple[SizedPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Range:
    """Turns in a row that one new segment replaces."""

    turn_ids: tuple[str, ...]
    source_tokens: int
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class Merge:
    segment_ids: tuple[str, ...]
    turn_ids: tuple[str, ...]
    rank: int
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedCut:
    turn_id: str
    part: Part
    index: int
    kind: Cut
    tokens: int
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens_after` counts each budget as used up. `first_changed`: tokens of the prompt before its first change."""

    way: Literal["trim", "elide", "summarize", "extract"]
    ranges: tuple[Range, ...]
    merges: tuple[Merge, ...]
    cuts: tuple[PlannedCut, ...]
    tokens_before: int
    tokens_after: int
    first_changed: int
    options: tuple[Option, ...] = ()

    @property
    def summary_budget(self) -> int:
        return sum(each.budget_tokens for each in self.ranges)

    def as_json(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "ranges": [{"turn_ids": list(r.turn_ids), "budget_tokens": r.budget_tokens} for r in self.ranges],
            "merges": [{"segment_ids": list(m.segment_ids), "budget_tokens": m.budget_tokens} for m in self.merges],
            "cuts": [{"turn_id": c.turn_id, "part": c.part, "index": c.index, "kind": c.kind} for c in self.cuts],
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "first_changed": self.first_changed,
            "options": [option.as_json() for option in self.options],
        }


@dataclass(frozen=True, slots=True)
class NoPlan:
    """off, below_trigger: nothing to do. nothing: no turn may be replaced. gain: it would free too little. floor: what
    must be kept is past the trigger by itself."""

    reason: Literal["off", "below_trigger", "nothing", "gain", "floor"]
    tokens_before: int
    tokens_after: int  # what the best attempt would have come to
    allowed_tokens: int  # what it would have had to come to
    options: tuple[Option, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "reason": self.reason,
            "tokens_before": self.tokens_before,
            "tokens_after": self.tokens_after,
            "allowed_tokens": self.allowed_tokens,
            "options": [option.as_json() for option in self.options],
        }


Urgency = Literal["auto", "asked", "hard"]


def plan(
    turns: Sequence[SizedTurn],
    segments: Sequence[Segment] = (),
    *,
    window: int,
    reserve_tokens: int,
    overhead_tokens: int,
    policy: Policy,
    urgency: Urgency = "auto",
    frame_tokens: int = FRAME_TOKENS,
    block_size: int = 32,
) -> Plan | NoPlan:
    """The compaction of this path, or why there is none.

    `overhead_tokens`: system prompt, tools, and what comes in new. `urgency` auto: past the trigger only; asked: as far
    as the policy lets; hard: the prompt must fit the window, whatever the trigger says.
    """
    ground = _Ground(turns, segments, window, reserve_tokens, overhead_tokens, policy, frame_tokens, block_size)
    before = ground.tokens(segments, {})
    allowed = _allowed(window, reserve_tokens, policy, urgency)
    if policy.strategy == "off" and urgency != "hard":
        return NoPlan("off", before, before, allowed)
    if urgency != "asked" and before <= allowed:
        return NoPlan("below_trigger", before, before, allowed)
    goal = 0 if urgency == "asked" else min(allowed, int(policy.target_ratio * window))
    drafts = [
        draft for draft in (_elided(ground, goal, allowed), _replaced(ground, goal, allowed)) if draft is not None
    ]
    if not drafts:
        return NoPlan("nothing", before, before, allowed, (_keep(before, allowed, ground),))
    options = [_keep(before, allowed, ground)]
    by_way: dict[str, Plan] = {}
    for draft in drafts:
        options.append(_priced(draft, ground, before, allowed, urgency))
        by_way[draft.way] = draft
    best = cheapest(option for option in options if option.way != "keep")
    if best is None:
        least = min(draft.tokens_after for draft in drafts)
        reason: Literal["gain", "floor"] = "gain" if least <= allowed else "floor"
        return NoPlan(reason, before, least, allowed, tuple(options))
    chosen = by_way[best.way]
    return Plan(
        chosen.way,
        chosen.ranges,
        chosen.merges,
        chosen.cuts,
        before,
        chosen.tokens_after,
        chosen.first_changed,
        tuple(options),
    )


def _allowed(window: int, reserve: int, policy: Policy, urgency: Urgency) -> int:
    """What the prompt may have: up to the trigger, or, where it must fit, up to the window."""
    share = window if urgency == "hard" else int(policy.trigger_ratio * window)
    return max(0, share - reserve)


class _Ground:
    """What a plan is made on: sizes, who must be kept, and in which units the rest goes."""

    def __init__(
        self,
        turns: Sequence[SizedTurn],
        segments: Sequence[Segment],
        window: int,
        reserve: int,
        overhead: int,
        policy: Policy,
        frame: int,
        block_size: int,
    ) -> None:
        self.turns, self.segments, self.window, self.reserve = turns, tuple(segments), window, reserve
        self.overhead, self.policy, self.frame, self.block_size = overhead, policy, frame, block_size
        self.ids = [turn.id for turn in turns]
        self.size = {turn.id: turn.tokens for turn in turns}
        self.pinned = frozenset(turn.id for turn in turns if turn.pinned)
        self.covered = frozenset(id for segment in segments for id in segment.turn_ids) - self.pinned
        first, last = policy.keep_first, max(1, policy.keep_last)
        self.kept = {turn.id for turn in (*turns[:first], *turns[-last:])} | self.pinned
        self.units = self._units()

    def _units(self) -> list[tuple[SizedTurn, ...]]:
        """Units that may be replaced, oldest first."""
        units: list[list[SizedTurn]] = []
        for turn in self.turns:
            if units and units[-1][-1].open_calls:
                units[-1].append(turn)
            else:
                units.append([turn])
        return [tuple(u) for u in units if not any(t.id in self.kept or t.id in self.covered for t in u)]

    def tokens(self, segments: Sequence[Segment], sizes: dict[str, int]) -> int:
        """Of the whole prompt, with these segments; `sizes`: turns that are shorter than they were."""
        total, in_run = self.overhead, False
        for entry in layout(self.ids, segments, self.pinned):
            if isinstance(entry, Segment):
                total += entry.tokens + (0 if in_run else self.frame)
                in_run = True
            else:
                total += sizes.get(entry, self.size[entry])
                in_run = False
        return total

    def first_changed(self, segments: Sequence[Segment], sizes: dict[str, int]) -> int:
        """Tokens of the prompt as it is that the prompt with these segments begins with."""
        before = layout(self.ids, self.segments, self.pinned)
        after = layout(self.ids, segments, self.pinned)
        total, in_run = self.overhead, False
        for old, new in zip(before, after, strict=False):
            if isinstance(old, Segment) or isinstance(new, Segment):
                if old is not new:
                    break
                assert isinstance(old, Segment)
                total += old.tokens + (0 if in_run else self.frame)
                in_run = True
            elif old != new or old in sizes:
                break
            else:
                total += self.size[old]
                in_run = False
        return total


def _elided(ground: _Ground, goal: int, allowed: int) -> Plan | None:
    """Images first, then reasoning and tool outputs, then long messages in their middle, each oldest first."""
    return _with_cuts(ground, "elide", (), (), ground.segments, goal, allowed)


_WAYS: dict[Strategy, Literal["trim", "summarize", "extract"]] = {
    "trim": "trim",
    "off": "trim",  # asked for by an overflow that may truncate
    "extract": "extract",
    "summarize": "summarize",
}


def _replaced(ground: _Ground, goal: int, allowed: int) -> Plan | None:
    """As few of the oldest units as bring the prompt to the goal; cuts only where that is not enough."""
    units = ground.units
    if not units:
        return None
    low, high = 1, len(units)
    while low < high:
        middle = (low + high) // 2
        if ground.tokens(_with_new(ground, _ranges(ground, units[:middle])), {}) <= goal:
            high = middle
        else:
            low = middle + 1
    ranges = _ranges(ground, units[:low])
    if not ranges:
        return None
    segments = _with_new(ground, ranges)
    merges, segments = _merged(ground, segments)
    way = _WAYS[ground.policy.strategy]
    if ground.tokens(segments, {}) > allowed:
        return _with_cuts(ground, way, ranges, merges, segments, allowed, allowed)
    return _drafted(ground, way, ranges, merges, (), segments, {})


def _ranges(ground: _Ground, units: Sequence[tuple[SizedTurn, ...]]) -> tuple[Range, ...]:
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
        source = sum(turn.tokens for turn in group)
        budget = _budget(ground.policy, len(group), source)
        if source > budget + ground.frame:
            ranges.append(Range(tuple(turn.id for turn in group), source, budget))
    return tuple(ranges)


def _budget(policy: Policy, turns: int, source_tokens: int) -> int:
    if policy.strategy in ("trim", "off"):
        return MARKER_TOKENS
    return max(LEAST_SEGMENT, min(policy.tokens_per_turn * turns, source_tokens // 2))


def _with_new(ground: _Ground, ranges: Sequence[Range]) -> tuple[Segment, ...]:
    new = (
        Segment(f"new{at}", each.turn_ids, "", each.budget_tokens, "extracted", source_tokens=each.source_tokens)
        for at, each in enumerate(ranges)
    )
    return (*ground.segments, *new)


def _merged(ground: _Ground, segments: tuple[Segment, ...]) -> tuple[tuple[Merge, ...], tuple[Segment, ...]]:
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


def _mergeable(ground: _Ground, segments: Sequence[Segment]) -> list[Segment]:
    """MERGE_FAN frozen segments of one rank in one message, the lowest rank first; where there are none, all frozen
    ones of the longest message. What is new now is left alone."""
    runs: list[list[Segment]] = [[]]
    for entry in layout(ground.ids, segments, ground.pinned):
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


def _with_cuts(
    ground: _Ground,
    way: Literal["trim", "elide", "summarize", "extract"],
    ranges: tuple[Range, ...],
    merges: tuple[Merge, ...],
    segments: tuple[Segment, ...],
    goal: int,
    allowed: int,
) -> Plan | None:
    """Cut down to the goal in turns that may be replaced; in those that are kept only what is needed to be allowed."""
    covered = {id for segment in segments for id in segment.turn_ids} - ground.pinned
    cuts: list[PlannedCut] = []
    sizes: dict[str, int] = {}
    tokens = ground.tokens(segments, sizes)
    for cut in _cuttable(ground, covered):
        if tokens <= (allowed if cut.turn_id in ground.kept else goal):
            continue
        cuts.append(cut)
        sizes[cut.turn_id] = sizes.get(cut.turn_id, ground.size[cut.turn_id]) - cut.tokens + cut.budget_tokens
        tokens -= cut.tokens - cut.budget_tokens
    if not cuts and way == "elide":
        return None
    return _drafted(ground, way, ranges, merges, tuple(cuts), segments, sizes)


_ORDER: dict[Cut, int] = {"image": 0, "reasoning": 1, "tool_output": 2, "oversized": 3}


def _cuttable(ground: _Ground, covered: set[str]) -> list[PlannedCut]:
    """What may be cut out: of turns that may be replaced first, then by kind, then oldest first."""
    visible = [turn for turn in ground.turns if not turn.pinned and turn.id not in covered]
    found = [
        PlannedCut(turn.id, part.part, part.index, part.kind, part.tokens, budget)
        for turn in visible
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


def _drafted(
    ground: _Ground,
    way: Literal["trim", "elide", "summarize", "extract"],
    ranges: tuple[Range, ...],
    merges: tuple[Merge, ...],
    cuts: tuple[PlannedCut, ...],
    segments: tuple[Segment, ...],
    sizes: dict[str, int],
) -> Plan:
    after = ground.tokens(segments, sizes)
    return Plan(way, ranges, merges, cuts, 0, after, ground.first_changed(segments, sizes))


def _keep(before: int, allowed: int, ground: _Ground) -> Option:
    why = "past the trigger" if before > allowed else ""
    return price(
        "keep",
        tokens_before=before,
        tokens_after=before,
        first_changed=before,
        turns_to_come=expected_turns(len(ground.turns)),
        block_size=ground.block_size,
        eligible=before <= allowed,
        why=why,
    )


def _priced(draft: Plan, ground: _Ground, before: int, allowed: int, urgency: Urgency) -> Option:
    why = ""
    if draft.tokens_after > allowed and urgency != "asked":
        why = f"{draft.tokens_after} tokens would still be left, {allowed} are allowed"
    elif before - draft.tokens_after < least_gain(ground.window) and not (urgency == "hard" and not why):
        why = f"it would free {before - draft.tokens_after} tokens, {least_gain(ground.window)} are the least"
    return price(
        draft.way,
        tokens_before=before,
        tokens_after=draft.tokens_after,
        first_changed=draft.first_changed,
        turns_to_come=expected_turns(len(ground.turns)),
        summary_tokens=draft.summary_budget,
        block_size=ground.block_size,
        eligible=not why,
        why=why,
    )
