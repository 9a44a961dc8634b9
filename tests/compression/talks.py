"""Conversations whose tokens can be counted by hand, and a model of a session that carries plans out.

A word `~120#x` counts as 120 tokens, any other as one; an image `~700` as 700. Nothing here knows how a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from compression.budget import Policy
from compression.conversation import Item, Turn
from compression.plan import NoPlan, Plan, PlannedCut, SizedPart, SizedTurn, Urgency, plan
from compression.segments import ENDING, HEADING, READ, Segment
from compression.view import Cut, Elision, Folded, Part, View, fold, is_image, shown


def text(tokens: int, tag: str) -> str:
    return f"~{tokens}#{tag} " if tokens > 0 else ""


def weight(word: str) -> int:
    return int(word[1:].split("#")[0]) if word.startswith("~") else 1


@cache
def count(value: str) -> int:
    return sum(map(weight, value.split()))


FRAME = count(HEADING) + count(ENDING) + count(READ)


def user(tokens: int, tag: str, *images: int) -> Item:
    if not images:
        return Item("message", {"type": "message", "role": "user", "content": text(tokens, tag)})
    return Item("message", {"type": "message", "role": "user", "content": _pictured(tokens, tag, images)})


def assistant(tokens: int, tag: str) -> Item:
    return Item("message", {"type": "message", "role": "assistant", "content": text(tokens, tag)})


def reasoning(tokens: int, tag: str) -> Item:
    content = [{"type": "reasoning_text", "text": text(tokens, tag)}]
    return Item("reasoning", {"type": "reasoning", "content": content})


def call(call_id: str, tokens: int = 5) -> Item:
    payload = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": text(tokens, call_id)}
    return Item("function_call", payload)


def output(call_id: str, tokens: int, *images: int) -> Item:
    content: Any = _pictured(tokens, f"{call_id}o", images) if images else text(tokens, f"{call_id}o")
    return Item("function_call_output", {"type": "function_call_output", "call_id": call_id, "output": content})


def _pictured(tokens: int, tag: str, images: Sequence[int]) -> list[dict[str, Any]]:
    pictures = [{"type": "input_image", "image_url": f"~{image}"} for image in images]
    return [{"type": "input_text", "text": text(tokens, tag)}, *pictures]


def exchange(id: str, asked: int = 50, answered: int = 250) -> Turn:
    return Turn(id, None, 0, "completed", (user(asked, f"{id}u"),), (assistant(answered, f"{id}a"),))


def images_of(item: Item) -> int:
    content = item.payload.get("output" if item.type == "function_call_output" else "content")
    pictures = content if isinstance(content, list) else []
    return sum(count(str(part["image_url"])) for part in pictures if is_image(part))


def item_tokens(item: Item) -> int:
    return count(item.text) + images_of(item)


def prompt_tokens(folded: Folded, overhead: int) -> int:
    return overhead + count(folded.system) + sum(map(item_tokens, folded.items))


def words(folded: Folded) -> list[tuple[str, str, int]]:
    """The prompt after its overhead, word by word: who says it, the word, its tokens."""
    said = []
    for item in folded.items:
        spoken = (item.role or item.type, *item.text.split())
        said += [(spoken[0], word, weight(word)) for word in spoken[1:]]
        said += [(spoken[0], "image", images_of(item))] if images_of(item) else []
    return said


def common_tokens(before: Folded, after: Folded) -> int:
    total = 0
    for old, new in zip(words(before), words(after), strict=False):
        if old != new:
            break
        total += old[2]
    return total


@dataclass
class Talk:
    """A session: its path, what is pinned, what is shown of it, and the window it lives in."""

    window: int
    overhead: int = 0
    reserve: int = 0
    policy: Policy = field(default_factory=Policy)
    turns: list[Turn] = field(default_factory=list)
    pinned: set[str] = field(default_factory=set)
    view: View = field(default_factory=View)
    made: int = 0  # views

    def folded(self, view: View | None = None) -> Folded:
        return fold(self.turns, view or self.view, pinned=frozenset(self.pinned))

    @property
    def tokens(self) -> int:
        return prompt_tokens(self.folded(), self.overhead)

    @property
    def shown(self) -> list[str | Segment]:
        return shown(self.turns, self.view, frozenset(self.pinned))

    def sized(self) -> list[SizedTurn]:
        cuts = {(cut.turn_id, cut.part, cut.index) for cut in self.view.elisions if cut.turn_id not in self.pinned}
        now = fold(self.turns, replace(self.view, segments=()), pinned=frozenset(self.pinned))
        left = iter(now.items)
        return [_sized(turn, turn.id in self.pinned, cuts, left) for turn in self.turns]

    def plan(self, urgency: Urgency = "auto", policy: Policy | None = None) -> Plan | NoPlan:
        return plan(
            self.sized(),
            self.view.segments,
            window=self.window,
            reserve_tokens=self.reserve,
            overhead_tokens=self.overhead,
            policy=policy or self.policy,
            urgency=urgency,
            frame_tokens=FRAME,
        )

    def carried_out(self, made: Plan, length: Callable[[int], int] = lambda budget: budget) -> View:
        """The view after a plan. `length`: tokens that a summary takes of its budget."""
        name = f"v{self.made + 1}"
        gone = {id for merge in made.merges for id in merge.segment_ids}
        segments = [segment for segment in self.view.segments if segment.id not in gone]
        for at, each in enumerate((*made.merges, *made.ranges)):
            id, tokens = f"{name}s{at}", length(each.budget_tokens)
            rank = getattr(each, "rank", 0)
            sources = getattr(each, "segment_ids", ())
            segments.append(Segment(id, each.turn_ids, text(tokens, id), tokens, "model", rank, merged=sources))
        cuts = (*self.view.elisions, *(self._cut(cut) for cut in made.cuts))
        return View(name, tuple(segments), cuts)

    def carry_out(self, made: Plan, length: Callable[[int], int] = lambda budget: budget) -> None:
        self.view = self.carried_out(made, length)
        self.made += 1

    def _cut(self, cut: PlannedCut) -> Elision:
        turn = next(turn for turn in self.turns if turn.id == cut.turn_id)
        item = (turn.input if cut.part == "input" else turn.output)[cut.index]
        beside = count(item.text) if cut.kind == "image" else 0
        marker = text(cut.budget_tokens - beside, f"{cut.turn_id}{cut.part}{cut.index}")
        return Elision(cut.turn_id, cut.part, cut.index, cut.kind, marker, cut.tokens - cut.budget_tokens)


def _sized(turn: Turn, pinned: bool, cuts: set[tuple[str, Part, int]], left: Iterable[Item]) -> SizedTurn:
    parts = []
    rest = iter(left)
    named: tuple[tuple[Part, tuple[Item, ...]], ...] = (("input", turn.input), ("output", turn.output))
    for part, items in named:
        for index, item in enumerate(items):
            cut = (turn.id, part, index) in cuts
            if cut and item.type == "reasoning":
                continue
            stands = next(rest)
            kind = None if cut else _kind(item)
            beside = count(item.text) if kind == "image" else 0
            parts.append(SizedPart(part, index, item_tokens(stands), kind, beside))
    waiting = {item.payload["call_id"] for item in turn.items if item.type == "function_call"}
    return SizedTurn(turn.id, sum(part.tokens for part in parts), pinned, bool(waiting), tuple(parts))


def _kind(item: Item) -> Cut | None:
    if item.type == "function_call":
        return None
    if item.type == "reasoning":
        return "reasoning"
    if images_of(item):
        return "image"
    return "tool_output" if item.type == "function_call_output" else "oversized"
