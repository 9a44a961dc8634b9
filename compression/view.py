"""What is sent of a path: its turns, with segments where turns were replaced and markers where parts were cut out.

    path    t1 | t2 t3 t4 | t5 (pinned) | t6 | t7 t8 t9
    view    t1 | [s1]     | t5          | [s2] | t7 t8 t9        s1 = t2..t4, s2 = t6

One function folds a path and a view into items; nothing else decides what is sent. Raw turns are never changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from compression.budget import Reasoning
from compression.conversation import Item, Turn, open_calls
from compression.segments import READ, Segment, summary_text

Part = Literal["input", "output"]
Cut = Literal["image", "reasoning", "tool_output", "oversized"]
Placement = Literal["exchange", "in_user", "in_system"]


@dataclass(frozen=True, slots=True)
class Elision:
    """`text` stands where an item's content was; an image's marker stands where the image was. `tokens_removed`: of
    what was there and is told no more, as the marker says."""

    turn_id: str
    part: Part
    index: int  # of the item in that part of the turn
    kind: Cut
    text: str
    tokens_removed: int

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class View:
    """`id` names it in the fingerprint of every path that was rendered through it."""

    id: str | None = None
    segments: tuple[Segment, ...] = ()
    elisions: tuple[Elision, ...] = ()

    @property
    def covered(self) -> frozenset[str]:
        return frozenset(turn_id for segment in self.segments for turn_id in segment.turn_ids)

    def as_json(self) -> dict[str, Any]:
        return {
            "segments": [segment.as_json() for segment in self.segments],
            "elisions": [elision.as_json() for elision in self.elisions],
        }

    @classmethod
    def of_json(cls, id: str, value: Mapping[str, Any]) -> View:
        segments = tuple(Segment.of_json(segment) for segment in value.get("segments", ()))
        return cls(id, segments, tuple(Elision(**elision) for elision in value.get("elisions", ())))


RAW = View()


def layout(turn_ids: Sequence[str], segments: Sequence[Segment], pinned: frozenset[str]) -> list[str | Segment]:
    """Ids of turns that stand as they are, and segments where the first turn of theirs stood that is not pinned.

    A segment that tells of a turn off this path is not shown: what it stood for stands raw.
    """
    path = set(turn_ids)
    of = {
        turn_id: at
        for at, segment in enumerate(segments)
        if path.issuperset(segment.turn_ids)
        for turn_id in segment.turn_ids
        if turn_id not in pinned
    }
    placed: set[int] = set()
    entries: list[str | Segment] = []
    for turn_id in turn_ids:
        at = of.get(turn_id)
        if at is None:
            entries.append(turn_id)
        elif at not in placed:
            placed.add(at)
            entries.append(segments[at])
    return entries


def units(turn_ids: Sequence[str], waiting: Container[str]) -> list[tuple[str, ...]]:
    """Turns that stay or go together: one that ends in calls without their output (`waiting`) is one with the next."""
    groups: list[list[str]] = []
    for turn_id in turn_ids:
        if groups and groups[-1][-1] in waiting:
            groups[-1].append(turn_id)
        else:
            groups.append([turn_id])
    return [tuple(group) for group in groups]


def held(turn_ids: Sequence[str], pinned: frozenset[str], waiting: Container[str]) -> frozenset[str]:
    """Turns that stand raw because of pins: a pinned output stands with its call."""
    return pinned.union(*(unit for unit in units(turn_ids, waiting) if not pinned.isdisjoint(unit)))


def shown(turns: Sequence[Turn], view: View, pinned: frozenset[str]) -> list[str | Segment]:
    """The order in which raw turns and segments are sent."""
    ids = [turn.id for turn in turns]
    if not view.segments:
        return list(ids)
    waiting = {turn.id for turn in turns if open_calls(turn.items)} if pinned else ()
    return layout(ids, view.segments, held(ids, pinned, waiting))


@dataclass(frozen=True, slots=True)
class Folded:
    """`system`: what the system prompt ends with, where the summary is placed there."""

    items: tuple[Item, ...]
    system: str = ""


def fold(
    turns: Sequence[Turn],
    view: View,
    *,
    pinned: frozenset[str] = frozenset(),
    placement: Placement = "exchange",
    reasoning: Reasoning = "template",
) -> Folded:
    """The items of a path as this view shows them.

    exchange   a summary is a user message that the assistant has read
    in_user    it stands in front of the next user message
    in_system  all of it ends the system prompt
    """
    by_id = {turn.id: turn for turn in turns}
    cuts = _cuts(view.elisions, pinned)
    items: list[Item] = []
    run: list[Segment] = []
    in_front, system = "", ""

    def close_run() -> str:
        nonlocal in_front, system
        text = summary_text(run)
        run.clear()
        if placement == "exchange":
            items.extend((_message("user", text), _message("assistant", READ)))
        elif placement == "in_user":
            in_front += text + "\n\n"
        else:
            system += ("\n\n" if system else "") + text
        return text

    entries = shown(turns, view, pinned)
    last = entries[-1] if entries else None
    for entry in entries:
        if isinstance(entry, Segment):
            run.append(entry)
            continue
        if run:
            close_run()
        for item in _visible(by_id[entry], cuts, strip=reasoning == "strip" and entry != last and entry not in pinned):
            if in_front and item.role == "user":
                item, in_front = _prepended(item, in_front), ""
            items.append(item)
    if run:
        close_run()
    if in_front:
        items.extend((_message("user", in_front.rstrip()), _message("assistant", READ)))
    return Folded(tuple(items), system)


def _cuts(elisions: Iterable[Elision], pinned: frozenset[str]) -> dict[tuple[str, Part, int], Elision]:
    return {(cut.turn_id, cut.part, cut.index): cut for cut in elisions if cut.turn_id not in pinned}


def _visible(turn: Turn, cuts: Mapping[tuple[str, Part, int], Elision], *, strip: bool) -> Iterable[Item]:
    parts: tuple[tuple[Part, tuple[Item, ...]], ...] = (("input", turn.input), ("output", turn.output))
    for part, items in parts:
        for index, item in enumerate(items):
            cut = cuts.get((turn.id, part, index))
            if item.type == "reasoning" and (strip or cut is not None):
                continue
            yield item if cut is None else elided(item, cut)


def elided(item: Item, cut: Elision) -> Item:
    """The item with the marker in place of what was cut out of it."""
    name = "output" if item.type == "function_call_output" else "content"
    content = item.payload.get(name)
    if cut.kind == "image" and isinstance(content, list):
        kept = [part for part in content if not is_image(part)]
        return replace(item, payload={**item.payload, name: [*kept, {"type": "input_text", "text": cut.text}]})
    return replace(item, payload={**item.payload, name: cut.text})


def is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "input_image")


def _message(role: str, text: str) -> Item:
    return Item("message", {"type": "message", "role": role, "content": text})


def _prepended(item: Item, text: str) -> Item:
    content = item.payload.get("content")
    joined = text + content if isinstance(content, str) else [{"type": "input_text", "text": text}, *(content or ())]
    return replace(item, payload={**item.payload, "content": joined})


def orphans(items: Iterable[Item]) -> list[str]:
    """Call ids of tool outputs whose call does not stand before them. A view that is sent has none."""
    called: set[str] = set()
    found: list[str] = []
    for item in items:
        if item.type == "function_call":
            called.add(str(item.payload["call_id"]))
        elif item.type == "function_call_output" and item.payload["call_id"] not in called:
            found.append(str(item.payload["call_id"]))
    return found
