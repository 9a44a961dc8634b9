"""Plans a compaction: which turns a summary replaces, which segments are merged, which parts are cut out. Pure.

    prompt   | overhead | t1 | s1 s2 | t5 t6 t7 | t8 (pinned) | t9 | t10 t11 t12 |
    kept       system     first        ...         pins                last 3
    plan     | overhead | t1 | s1 s2 s3(t5..t7) | t8 | s4(t9) | t10 t11 t12 |

Whole units only: a turn whose tool calls the next turn answers is one unit with it. A plan shrinks the prompt by the
least gain at least, and brings it below the trigger. Where what is kept is past that by itself, it frees half of the
room up to the window, so that the next is some turns away. What cannot is a NoPlan with the numbers: nothing loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from compression.budget import Policy, Strategy, least_answer, least_gain, share
from compression.cost import Option, Way, cheapest, expected_turns, price
from compression.cuts import PlannedCut, cuts_down_to
from compression.ground import FRAME_TOKENS, Ground, SizedPart, SizedTurn
from compression.merges import Merge, merged
from compression.ranges import Range, ranges_down_to, with_new
from compression.segments import Segment

__all__ = ["Merge", "NoPlan", "Plan", "PlannedCut", "Range", "SizedPart", "SizedTurn", "Urgency", "plan"]

Replacing = Literal["trim", "summarize", "extract"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`tokens_after` counts each budget as used up. `first_changed`: tokens of the prompt before its first change.
    `why`: what spoke for it."""

    way: Literal["elide"] | Replacing
    ranges: tuple[Range, ...]
    merges: tuple[Merge, ...]
    cuts: tuple[PlannedCut, ...]
    tokens_before: int
    tokens_after: int
    first_changed: int
    options: tuple[Option, ...] = ()
    why: str = ""

    @property
    def summary_budget(self) -> int:
        return sum(each.budget_tokens for each in self.ranges)

    def as_json(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "why": self.why,
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
    must be kept is past the trigger by itself, and little else is there yet to free."""

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
    room = _Room.of(window, reserve_tokens, policy, urgency)
    before, allowed = ground.before, room.allowed
    if policy.strategy == "off" and urgency != "hard":
        return NoPlan("off", before, before, allowed)
    if urgency != "asked" and before <= allowed:
        return NoPlan("below_trigger", before, before, allowed)
    options = [_keep(ground, room)]
    far: tuple[Plan, Option] | None = None  # as far as the policy lets, and it would not fit yet: only where asked for
    least, drafted = before, False
    for nth, drafts in enumerate(_attempts(ground, room)):
        by_option = {_priced(draft, ground, room.against(draft, last_resort=nth > 0)): draft for draft in drafts}
        options += by_option
        best = cheapest(by_option)
        if best is not None and best.tokens_after <= room.fits:
            return _chosen(by_option[best], best, ground, room, options)
        far = far or ((by_option[best], best) if best is not None else None)
        least, drafted = min([least, *(draft.tokens_after for draft in drafts)]), drafted or bool(drafts)
    if far is not None:
        return _chosen(*far, ground, room, options)
    every = (*options, *_not_open(ground, room, options))
    if not drafted:
        return NoPlan("nothing", before, before, allowed, every)
    return NoPlan("gain" if least <= allowed else "floor", before, least, allowed, every)


@dataclass(frozen=True, slots=True)
class _Room:
    """Tokens that a prompt may have. allowed: up to the trigger, or, where it must fit, as many as fit. fits: all but
    the least that an answer needs."""

    urgency: Urgency
    allowed: int
    fits: int
    least: int  # to be freed
    goal: int

    @classmethod
    def of(cls, window: int, reserve: int, policy: Policy, urgency: Urgency) -> _Room:
        fits = max(0, window - least_answer(window, reserve))
        allowed = fits if urgency == "hard" else max(0, share(policy.trigger_ratio, window) - reserve)
        goal = 0 if urgency == "asked" else min(allowed, share(policy.target_ratio, window))
        return cls(urgency, allowed, fits, least_gain(window), goal)

    def against(self, draft: Plan, *, last_resort: bool = False) -> str:
        """Why it may not be taken; nothing where it may. What is asked for goes as far as it can; where parts of kept
        turns are cut for it, it fits then."""
        after, freed = draft.tokens_after, draft.tokens_before - draft.tokens_after
        if after > self.fits and (last_resort or self.urgency != "asked"):
            return f"{after} tokens would still be left, {self.allowed} are allowed"
        if after > self.allowed and self.urgency != "asked" and freed < (half := (self.fits - after) // 2):
            told = f"{after} tokens would still be left, {self.allowed} are allowed"
            return f"{told}: it would have to free {half} at once, and would free {freed}"
        if freed < self.least and self.urgency != "hard":
            return f"it would free {freed} tokens, {self.least} are the least"
        return ""


def _attempts(ground: Ground, room: _Room) -> Iterator[list[Plan]]:
    """What may be done, the gentlest first: turns that may go; where the prompt would not fit, parts of turns that are
    kept; turns go without summary. Of the first, elision and replacement are weighed against each other, but where all
    is asked for."""
    asked, hard = room.urgency == "asked", room.urgency == "hard"
    gentle = _draft(ground, room, merge_alone=not asked)
    yield _distinct(None if asked else _draft(ground, room, replacing=False), gentle)
    if ground.before <= room.fits:
        return
    harsher = _draft(ground, room, merge_alone=not asked, cut_kept=True)
    if harsher != gentle:
        yield _distinct(harsher)
    if hard and ground.policy.strategy not in ("trim", "off"):
        yield _distinct(_draft(_with(ground, "trim"), room, merge_alone=True, cut_kept=True))


def _with(ground: Ground, strategy: Strategy) -> Ground:
    return replace(ground, policy=replace(ground.policy, strategy=strategy))


def _distinct(*drafts: Plan | None) -> list[Plan]:
    return list(dict.fromkeys(draft for draft in drafts if draft is not None))


_WAYS: dict[Strategy, Replacing] = {
    "trim": "trim",
    "off": "trim",  # asked for by an overflow that may truncate
    "extract": "extract",
    "summarize": "summarize",
}


def _draft(
    ground: Ground, room: _Room, *, replacing: bool = True, merge_alone: bool = False, cut_kept: bool = False
) -> Plan | None:
    """As few of the oldest units as bring the prompt to the goal; cuts only where that is not enough. `cut_kept`: also
    in turns that are kept, until it fits."""
    ranges = ranges_down_to(ground, room.goal) if replacing else ()
    merges: tuple[Merge, ...] = ()
    segments = with_new(ground, ranges)
    if ranges or merge_alone:
        merges, segments = merged(ground, segments, room.allowed)
    cuts, sizes = cuts_down_to(ground, segments, room.goal, kept_down_to=room.fits if cut_kept else None)
    if not (ranges or merges or cuts):
        return None
    way: Literal["elide"] | Replacing = _WAYS[ground.policy.strategy] if ranges or merges else "elide"
    after, first_changed = ground.tokens(segments, sizes), ground.first_changed(segments, sizes)
    return Plan(way, ranges, merges, cuts, ground.before, after, first_changed)


def _chosen(draft: Plan, best: Option, ground: Ground, room: _Room, options: list[Option]) -> Plan:
    """With the price of every way, and what spoke for this one."""
    keep = options[0].why
    why = f"{keep}; of the ways that are open it is worth most"
    if best.worth < 0:
        why += ". It costs more prefill than it is expected to save, and to keep all is not open"
    return replace(draft, options=(*options, *_not_open(ground, room, options)), why=why)


def _not_open(ground: Ground, room: _Room, options: Sequence[Option]) -> Iterator[Option]:
    """The price of the ways that were not tried, and why they are not open."""
    tried = {option.way for option in options}
    if "elide" not in tried:
        draft = _draft(ground, room, replacing=False)
        if draft is None:
            yield _nothing("elide", ground, "nothing that may be cut out stands outside the turns that are kept")
        else:
            why = room.against(draft) or "it was asked to compact as far as the policy lets"
            yield _priced(draft, ground, why)
    for way in ("trim", "extract", "summarize"):
        if way in tried:
            continue
        draft = _draft(_with(ground, way), room)
        if draft is None or draft.way == "elide":
            yield _nothing(way, ground, "no turn may be replaced")
        else:
            own = _WAYS[ground.policy.strategy] == way
            yield _priced(draft, ground, room.against(draft) if own else f"the strategy is {ground.policy.strategy}")


def _keep(ground: Ground, room: _Room) -> Option:
    if ground.before > room.fits:
        why = f"{ground.before} tokens do not fit, {room.fits} do"
    elif ground.before > room.allowed:
        why = f"past the trigger at {room.allowed} tokens"
    else:
        why = "a compaction was asked for"
    return _nothing("keep", ground, why)


def _nothing(way: Way, ground: Ground, why: str) -> Option:
    return price(
        way,
        tokens_before=ground.before,
        tokens_after=ground.before,
        first_changed=ground.before,
        turns_to_come=expected_turns(len(ground.turns)),
        block_size=ground.block_size,
        eligible=False,
        why=why,
    )


def _priced(draft: Plan, ground: Ground, why: str) -> Option:
    """`why`: what is against it."""
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
