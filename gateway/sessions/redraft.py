"""From a plan and the summaries that were written for it to the view that will be sent. Plain functions.

Earlier segments stay what they are; what is new is appended, what is merged takes the place of what it was merged of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compression.conversation import Turn
from compression.extract import merge
from compression.ground import MARKER_TOKENS
from compression.guard import Ledger, facts_of
from compression.plan import Merge, Plan, PlannedCut, Range
from compression.segments import Segment, left_out, source_hash
from compression.summarize import Written
from compression.transcript import shortened
from compression.view import Elision, View, is_image

Count = Callable[[str], int]


def redrafted(
    view: View,
    plan: Plan,
    turns: Sequence[Turn],
    written: Mapping[Range, Written],
    *,
    id: str,
    count: Count,
    new_id: Callable[[], str],
) -> View:
    """The view that `plan` asks for. Blocking: it counts tokens of what it cuts."""
    by_id = {turn.id: turn for turn in turns}
    segments = list(view.segments)
    for each in plan.merges:
        segments = _merged(segments, each, count, new_id())
    for each_range, text in written.items():
        raw = [by_id[turn_id] for turn_id in each_range.turn_ids]
        segments.append(
            Segment(
                new_id(),
                each_range.turn_ids,
                text.text,
                count(text.text),
                text.source,
                source_tokens=each_range.source_tokens,
                source_hash=source_hash(raw),
                facts=ledger_of(raw, text.text),
            )
        )
    covered = {turn_id for segment in segments for turn_id in segment.turn_ids}
    cuts = [cut for cut in view.elisions if cut.turn_id not in covered]
    cuts += [cut_out(by_id[cut.turn_id], cut, count) for cut in plan.cuts]
    return View(id, tuple(segments), tuple(cuts))


def ledger_of(turns: Sequence[Turn], text: str) -> tuple[str, ...]:
    """The values of the turns' facts that `text` still holds."""
    return tuple(fact.value for fact in Ledger(facts_of(turns)).kept(text))


def _merged(segments: Sequence[Segment], plan: Merge, count: Count, id: str) -> list[Segment]:
    group = [segment for segment in segments if segment.id in plan.segment_ids]
    if all(segment.source == "dropped" for segment in group):
        text, source = left_out(len(plan.turn_ids)), group[0].source
    else:
        texts = [segment.text for segment in group]
        text, source = merge(texts, budget_tokens=plan.budget_tokens, count=count), "extracted"
    facts = tuple(dict.fromkeys(fact for segment in group for fact in segment.facts if fact in text))
    one = Segment(
        id,
        plan.turn_ids,
        text,
        count(text),
        source,
        plan.rank,
        sum(segment.source_tokens for segment in group),
        group[0].source_hash if len(group) == 1 else "",
        facts,
        plan.segment_ids,
    )
    out: list[Segment] = []
    for segment in segments:
        if segment is group[0]:
            out.append(one)
        elif segment not in group:
            out.append(segment)
    return out


def cut_out(turn: Turn, cut: PlannedCut, count: Count) -> Elision:
    """The marker that stands where a part was, and the tokens it says are missing."""
    item = (turn.input if cut.part == "input" else turn.output)[cut.index]
    text, removed = "", cut.tokens
    if cut.kind == "image":
        content = item.payload.get("output" if item.type == "function_call_output" else "content")
        images = sum(map(is_image, content)) if isinstance(content, list) else 0
        text = f"[{images} image{'s' if images != 1 else ''} left out]"
        removed = max(0, cut.tokens - max(0, cut.budget_tokens - MARKER_TOKENS))
    elif cut.kind == "tool_output":
        removed = count(item.text)
        text = f"[tool output of {removed} tokens left out]"
    elif cut.kind == "oversized":
        short = shortened(item.text, budget_tokens=cut.budget_tokens, count=count)
        text, removed = short.text, short.removed_tokens
    return Elision(cut.turn_id, cut.part, cut.index, cut.kind, text, removed)


def anchor(turns: Sequence[Turn], view: View) -> str | None:
    """The latest turn of the path that the view touches: paths that hold it are seen through the view."""
    touched = view.covered | {cut.turn_id for cut in view.elisions}
    return next((turn.id for turn in reversed(turns) if turn.id in touched), None)
