"""Plans a compaction: which turns a summary replaces, which segments are merged, which parts are cut out. Pure.

    prompt   | overhead | t1 | s1 s2 | t5 t6 t7 | t8 (pinned) | t9 | t10 t11 t12 |
    kept       system     first        ...         pins                last 3
    plan     | overhead | t1 | s1 s2 s3(t5..t7) | t8 | s4(t9) | t10 t11 t12 |

Whole units only: a turn whose tool calls the next turn answers is one unit with it. A plan shrinks the prompt by the
least gain at least, and brings it below the trigger; what cannot is a NoPlan with the numbers, so nothing loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from compression.budget import Policy, Strategy, least_answer, least_gain, share
from compression.cost import Option, cheapest, expected_turns, price
from compression.cuts import PlannedCut, cuts_down_to
from compression.ground import FRAME_TOKENS, Ground, SizedPart, SizedTurn
from compression.merges import Merge, merged
from compression.ranges import Range, ranges_down_to, with_new
from compression.segments import Segment

__all__ = ["Merge", "NoPlan", "Plan", "PlannedCut", "Range", "SizedPart", "SizedTurn", "Urgency", "plan"]

Replacing = Literal["trim", "summarize", "extract"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens_after` counts each budget as used up. `first_changed`: tokens of the prompt before its first change."""

    way: Literal["elide"] | Replacing
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
    ground = Ground(tuple(turns), tuple(segments), window, overhead_tokens, policy, frame_tokens, block_size)
    before, allowed = ground.before, _allowed(window, reserve_tokens, policy, urgency)
    if policy.strategy == "off" and urgency != "hard":
        return NoPlan("off", before, before, allowed)
    if urgency != "asked" and before <= allowed:
        return NoPlan("below_trigger", before, before, allowed)
    options, least = [_keep(ground, allowed)], before
    far: Plan | None = None  # as far as the policy lets, and not below what is allowed: only where it was asked for
    for nth, drafts in enumerate(_attempts(ground, allowed, urgency)):
        most = allowed if nth or urgency != "asked" else before
        by_option = {_priced(draft, ground, most, urgency): draft for draft in drafts}
        options += by_option
        best = cheapest(by_option)
        chosen = by_option[best] if best is not None else None
        if chosen is not None and chosen.tokens_after <= allowed:
            return replace(chosen, options=tuple(options))
        far = far or chosen
        least = min([least, *(draft.tokens_after for draft in drafts)])
    if far is not None:
        return replace(far, options=tuple(options))
    if len(options) == 1:
        return NoPlan("nothing", before, before, allowed, tuple(options))
    return NoPlan("gain" if least <= allowed else "floor", before, least, allowed, tuple(options))


def _allowed(window: int, reserve: int, policy: Policy, urgency: Urgency) -> int:
    """What the prompt may have: up to the trigger, or, where it must fit, all but the least that an answer needs."""
    if urgency == "hard":
        return max(0, window - least_answer(window, reserve))
    return max(0, share(policy.trigger_ratio, window) - reserve)


def _attempts(ground: Ground, allowed: int, urgency: Urgency) -> Iterator[list[Plan]]:
    """What may be done, the gentlest first: turns that may go; parts of turns that are kept; turns go without summary.
    Of the first, elision and replacement are weighed against each other, but where all is asked for."""
    asked = urgency == "asked"
    goal = 0 if asked else min(allowed, share(ground.policy.target_ratio, ground.window))
    gentle = _draft(ground, goal, allowed, merge_alone=not asked)
    elided = None if asked else _draft(ground, goal, allowed, replacing=False)
    yield _distinct(elided, gentle)
    harsher = _draft(ground, goal, allowed, merge_alone=not asked, cut_kept=True)
    if harsher != gentle:
        yield _distinct(harsher)
    if urgency == "hard" and ground.policy.strategy not in ("trim", "off"):
        trimming = replace(ground, policy=replace(ground.policy, strategy="trim"))
        yield _distinct(_draft(trimming, goal, allowed, merge_alone=True, cut_kept=True))


def _distinct(*drafts: Plan | None) -> list[Plan]:
    return list(dict.fromkeys(draft for draft in drafts if draft is not None))


_WAYS: dict[Strategy, Replacing] = {
    "trim": "trim",
    "off": "trim",  # asked for by an overflow that may truncate
    "extract": "extract",
    "summarize": "summarize",
}


def _draft(
    ground: Ground,
    goal: int,
    allowed: int,
    *,
    replacing: bool = True,
    merge_alone: bool = False,
    cut_kept: bool = False,
) -> Plan | None:
    """As few of the oldest units as bring the prompt to the goal; cuts only where that is not enough."""
    ranges = ranges_down_to(ground, goal) if replacing else ()
    merges: tuple[Merge, ...] = ()
    segments = with_new(ground, ranges)
    if ranges or merge_alone:
        merges, segments = merged(ground, segments, allowed)
    cuts, sizes = cuts_down_to(ground, segments, goal, kept_down_to=allowed if cut_kept else None)
    if not (ranges or merges or cuts):
        return None
    way: Literal["elide"] | Replacing = _WAYS[ground.policy.strategy] if ranges or merges else "elide"
    after, first_changed = ground.tokens(segments, sizes), ground.first_changed(segments, sizes)
    return Plan(way, ranges, merges, cuts, ground.before, after, first_changed)


def _keep(ground: Ground, allowed: int) -> Option:
    return price(
        "keep",
        tokens_before=ground.before,
        tokens_after=ground.before,
        first_changed=ground.before,
        turns_to_come=expected_turns(len(ground.turns)),
        block_size=ground.block_size,
        eligible=ground.before <= allowed,
        why="past the trigger" if ground.before > allowed else "",
    )


def _priced(draft: Plan, ground: Ground, most: int, urgency: Urgency) -> Option:
    """`most`: tokens that may be left."""
    freed, least = draft.tokens_before - draft.tokens_after, least_gain(ground.window)
    why = ""
    if draft.tokens_after > most:
        why = f"{draft.tokens_after} tokens would still be left, {most} are allowed"
    elif freed < least and urgency != "hard":
        why = f"it would free {freed} tokens, {least} are the least"
    return price(
        draft.way,
        tokens_before=draft.tokens_before,
        tokens_after=draft.tokens_after,
        first_changed=draft.first_changed,
        turns_to_come=expected_turns(len(ground.turns)),
        summary_tokens=draft.summary_budget,
        block_size=ground.block_size,
        eligible=not why,
        why=why,
    )
