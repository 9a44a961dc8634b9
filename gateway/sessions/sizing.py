"""Tokens of each turn of a path, as a plan needs them: counted text by text, with what the template puts around it.

The whole prompt is known exactly; what the parts do not account for is the overhead, so that the sum is exact too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from compression.conversation import Item, Turn
from compression.plan import SizedPart, SizedTurn
from compression.segments import READ, Segment, summary_text
from compression.view import Cut, Elision, Part, View, elided, is_image, shown
from gateway.sessions.counting import OVERHEAD_PER_MESSAGE, estimate
from gateway.sessions.items import open_calls
from gateway.sessions.tokens import ModelTokens

IMAGE_TOKENS = 768  # of an image where the engine does not say: what common vision models take for a megapixel


@dataclass(frozen=True, slots=True)
class Sizes:
    turns: tuple[SizedTurn, ...]
    overhead_tokens: int  # system prompt, tools, what the template adds: all that no turn accounts for
    frame_tokens: int  # around the segments of one summary message


def around(model: ModelTokens | None) -> int:
    """Tokens of role and end-of-turn around a message."""
    return OVERHEAD_PER_MESSAGE if model is None else model.message_overhead


def counter(model: ModelTokens | None) -> Callable[[str], int]:
    """Tokens of a text: the model's own count, or an estimate with a margin where nobody here has its tokenizer."""
    if model is None:
        return lambda text: estimate(text).tokens
    return model.count


def sizes(
    turns: Sequence[Turn],
    view: View,
    pinned: frozenset[str],
    *,
    prompt_tokens: int,
    count: Callable[[str], int],
    around: int,
    strip_reasoning: bool = False,
) -> Sizes:
    """`prompt_tokens`: of the path as it is shown now; `around`: around a message. Blocking: some milliseconds."""
    cuts = {(cut.turn_id, cut.part, cut.index): cut for cut in view.elisions if cut.turn_id not in pinned}
    sized = tuple(_sized(turn, cuts, turn.id in pinned, count, around, strip_reasoning) for turn in turns)
    by_id = {turn.id: turn.tokens for turn in sized}
    frame = count(summary_text(())) + count(READ) + 2 * around
    known, in_run = 0, False
    for entry in shown(turns, view, pinned):
        if isinstance(entry, Segment):
            known += entry.tokens + (0 if in_run else frame)
            in_run = True
        else:
            known += by_id[entry]
            in_run = False
    return Sizes(sized, max(0, prompt_tokens - known), frame)


def _sized(
    turn: Turn,
    cuts: Mapping[tuple[str, Part, int], Elision],
    pinned: bool,
    count: Callable[[str], int],
    around: int,
    strip_reasoning: bool,
) -> SizedTurn:
    parts: list[SizedPart] = []
    named: tuple[tuple[Part, tuple[Item, ...]], ...] = (("input", turn.input), ("output", turn.output))
    for part, items in named:
        for index, item in enumerate(items):
            cut = cuts.get((turn.id, part, index))
            if cut is not None:
                left = 0 if cut.kind == "reasoning" else count(elided(item, cut).text) + around
                parts.append(SizedPart(part, index, left))
            elif not (strip_reasoning and item.type == "reasoning"):
                tokens, kind, stays = _measured(item, count, around)
                parts.append(SizedPart(part, index, tokens, kind, stays))
    waiting = bool(open_calls(turn.items))
    return SizedTurn(turn.id, sum(part.tokens for part in parts), pinned, waiting, tuple(parts))


def _measured(item: Item, count: Callable[[str], int], around: int) -> tuple[int, Cut | None, int]:
    """Its tokens, as what it may be cut out, and what then stays of it beside the marker."""
    if item.type == "function_call":
        return count(_call_text(item.payload)) + 2 * around, None, 0
    text = count(item.text) + around
    if item.type == "reasoning":
        return text, "reasoning", 0
    content = item.payload.get("output" if item.type == "function_call_output" else "content")
    images = sum(map(is_image, content)) if isinstance(content, list) else 0
    if images:
        return text + images * IMAGE_TOKENS, "image", text
    return text, "tool_output" if item.type == "function_call_output" else "oversized", 0


def _call_text(payload: Mapping[str, Any]) -> str:
    return orjson.dumps({"name": payload["name"], "arguments": payload["arguments"]}).decode()
