"""What compaction costs in prefill and in summary calls: one conversation of equal turns, no model, no tokenizer.

    prompt   | system | turn | turn | ... | turn |          a turn is a user's message and its answer
    a call   counts what stands after the first part that is not what it was in the last prompt

The others are given their best case: they compact before the turn's prompt is sent, and their summariser's own prefill
is free. Ours is counted as the gateway runs it: after the answer, with the summary request's suffix and the prefill of
the new prefix before the switch. `block` 1 is an exact prefix cache; with 32, a prefix that was cut is reused by whole
blocks only, while one that grows keeps its partial last block, as a session does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from compression.budget import Policy
from compression.cost import REQUEST_TOKENS
from compression.plan import FRAME_TOKENS, Plan, SizedTurn, plan
from compression.segments import Segment

ARTICLE_SUMMARY = 100  # tokens of the source article's summary of one turn
ROLLING_SUMMARY = 400  # tokens of a summary of all that went before


@dataclass(frozen=True, slots=True)
class Shape:
    """The conversation, and the window that it outgrows. Tokens."""

    turns: int = 80
    window: int = 8192
    system: int = 300
    turn: int = 300
    reserve: int = 512
    block: int = 32
    keep_first: int = 1
    keep_last: int = 3
    trigger: float = 0.70
    target: float = 0.40


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the prompt that stays or goes as a whole; equal parts are equal tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    method: str
    summary_calls: int
    prefill_tokens_per_turn: float
    compactions: int
    largest_prompt: int
    merges: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def size(parts: Sequence[Part]) -> int:
    return sum(part.tokens for part in parts)


def prefill(before: Sequence[Part], after: Sequence[Part], block: int) -> int:
    """Tokens of `after` that a cache which holds `before` has not."""
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += old.tokens
    grown = same == size(before)
    return size(after) - (same if grown else same // block * block)


Compact = Callable[[list[Part], Shape, int], tuple[list[Part], int]]  # parts, shape, number of the turn -> parts, calls


def drop_oldest(parts: list[Part], shape: Shape, number: int) -> tuple[list[Part], int]:
    """Turns go, oldest first, until the prompt is below the trigger."""
    kept = list(parts)
    while size(kept) > shape.trigger * shape.window and len(kept) > 1 + shape.keep_last:
        del kept[1]
    return kept, 0


def article(parts: list[Part], shape: Shape, number: int) -> tuple[list[Part], int]:
    """The source article's: first and last turns stay, each turn between becomes a summary of 100 tokens, one call
    each, oldest first, until the excess is free; when all are summaries, the oldest of them go."""
    kept, calls, limit = list(parts), 0, shape.trigger * shape.window
    first = 1 + shape.keep_first
    for at in range(first, len(kept) - shape.keep_last):
        if size(kept) <= limit:
            break
        if kept[at].name.startswith("turn"):
            kept[at] = Part(f"summary of {kept[at].name}", ARTICLE_SUMMARY)
            calls += 1
    while size(kept) > limit and len(kept) > first + shape.keep_last:
        del kept[first]
    return kept, calls


def rolling(parts: list[Part], shape: Shape, number: int) -> tuple[list[Part], int]:
    """One summary, written anew from itself and the turns that it swallows, down to the target."""
    if size(parts) <= shape.trigger * shape.window:
        return parts, 0
    first, kept = 1 + shape.keep_first, parts
    for stop in range(first + 1, len(parts) - shape.keep_last + 1):
        kept = [*parts[:first], Part(f"summary {number}", ROLLING_SUMMARY), *parts[stop:]]
        if size(kept) <= shape.target * shape.window:
            break
    return kept, 1


def simulate(method: str, compact: Compact, shape: Shape, block: int) -> Row:
    """One of the others through the whole conversation."""
    held: list[Part] = []
    parts = [Part("system", shape.system)]
    calls = compactions = tokens = largest = 0
    for number in range(1, shape.turns + 1):
        parts = [*parts, Part(f"turn {number}", shape.turn)]
        compacted, made = compact(parts, shape, number)
        compactions += compacted != parts
        parts, calls = compacted, calls + made
        tokens += prefill(held, parts, block)
        largest = max(largest, size(parts))
        held = parts
    return Row(method, calls, round(tokens / shape.turns, 2), compactions, largest)


def simulate_ours(method: str, shape: Shape, policy: Policy, *, reserve: int) -> Row:
    """Our planner, as the gateway runs it: every budget used up, merges included."""
    turns: list[SizedTurn] = []
    segments: tuple[Segment, ...] = ()
    tokens, largest, calls, compactions, merges = shape.system, 0, 0, 0, 0
    prompt = shape.system
    for number in range(1, shape.turns + 1):
        turns.append(SizedTurn(f"turn {number}", shape.turn))
        tokens += shape.turn
        prompt += shape.turn
        largest = max(largest, prompt)
        made = plan(
            turns,
            segments,
            window=shape.window,
            reserve_tokens=reserve,
            overhead_tokens=shape.system,
            policy=policy,
            block_size=shape.block,
        )
        if not isinstance(made, Plan):
            continue
        compactions += 1
        merges += len(made.merges)
        if made.way == "summarize":
            calls += len(made.ranges)
            tokens += REQUEST_TOKENS * len(made.ranges)
        tokens += made.tokens_after - made.first_changed // shape.block * shape.block
        segments = carried_out(made, segments, number)
        prompt = made.tokens_after
    return Row(method, calls, round(tokens / shape.turns, 2), compactions, largest, merges)


def carried_out(made: Plan, segments: Sequence[Segment], number: int) -> tuple[Segment, ...]:
    """The segments after a plan, each as long as its budget allows."""
    gone = {id for merge in made.merges for id in merge.segment_ids}
    new = [
        Segment(f"s{number}.{at}", each.turn_ids, "", each.budget_tokens, "model")
        for at, each in enumerate(made.ranges)
    ]
    merged = [
        Segment(f"m{number}.{at}", each.turn_ids, "", each.budget_tokens, "extracted", each.rank)
        for at, each in enumerate(made.merges)
    ]
    standing = {id for merge in made.merges for id in merge.segment_ids if id.startswith(("new", "merged"))}
    assert not standing, f"a plan merges what it makes: {standing}"
    return (*(segment for segment in segments if segment.id not in gone), *merged, *new)


def accounting(shape: Shape, policy: Policy) -> dict[str, Any]:
    """Every row, the figures under the bars, and all parameters."""
    others: tuple[tuple[str, Compact], ...] = (
        ("source article, frees the excess", article),
        ("drop oldest", drop_oldest),
        ("one rolling summary", rolling),
    )
    ours = simulate_ours("ours", shape, policy, reserve=shape.reserve)
    rows = [
        ours,
        simulate_ours("ours, no reserve", shape, policy, reserve=0),
        simulate_ours("ours, extraction only", shape, replace(policy, strategy="extract"), reserve=shape.reserve),
        *(simulate(name, compact, shape, 1) for name, compact in others),
    ]
    at_blocks = [simulate(name, compact, shape, shape.block).as_json() for name, compact in others]
    return {
        "parameters": {
            **asdict(shape),
            "request_tokens": REQUEST_TOKENS,
            "frame_tokens": FRAME_TOKENS,
            "article_summary": ARTICLE_SUMMARY,
            "rolling_summary": ROLLING_SUMMARY,
            "policy": asdict(policy),
        },
        "rows": [row.as_json() for row in rows],
        "others_by_whole_blocks": at_blocks,
        "summary_calls": ours.summary_calls,
        "prefill_tokens_per_turn": ours.prefill_tokens_per_turn,
    }
