"""Turns as a plain transcript, with tool output replaced by a marker, and one oversized text cut in its middle.

The step after extraction in the chain of fallbacks, and how an over-long source is shown to another model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compression.conversation import Item, Turn

Count = Callable[[str], int]
HEAD_SHARE = 0.55  # of what is kept of a cut text stands before the marker
MIDDLE_SHARE = 0.4  # at most, of what is kept, for clauses with facts from the middle


def mask(turns: Sequence[Turn], *, budget_tokens: int, count: Count) -> str:
    """The turns as "User: …" lines; a tool's output is a marker with its size. Cut to the budget, newest kept."""
    lines: list[str] = []
    names: dict[str, str] = {}
    for turn in turns:
        for item in turn.items:
            line = _line(item, names, count)
            if line:
                lines.append(line)
    text = "\n".join(lines)
    if not text or count(text) <= budget_tokens:
        return text
    return elide(text, budget_tokens=budget_tokens, count=count)


def _line(item: Item, names: dict[str, str], count: Count) -> str:
    if item.type == "function_call":
        name = str(item.payload.get("name", "")) or "function"
        names[str(item.payload.get("call_id", ""))] = name
        return f"Call {name}: {' '.join(item.text.split())[:400]}"
    if item.type == "function_call_output":
        name = names.get(str(item.payload.get("call_id", "")), "")
        return f"Tool {name}".rstrip() + f": [output of {count(item.text)} tokens removed]"
    if item.type == "reasoning" or not item.text.strip():
        return ""
    return f"{(item.role or 'system').capitalize()}: {' '.join(item.text.split())}"


def marker(num_tokens: int) -> str:
    """What stands where tokens were cut."""
    return f"[… {num_tokens} tokens removed …]"


@dataclass(frozen=True, slots=True)
class Short:
    """A text that was cut, and the tokens that its marker says are missing of it."""

    text: str
    removed_tokens: int


def elide(text: str, *, budget_tokens: int, count: Count) -> str:
    """The text of `shortened`."""
    return shortened(text, budget_tokens=budget_tokens, count=count).text


def shortened(text: str, *, budget_tokens: int, count: Count) -> Short:
    """The text's head and tail around a marker with the number of removed tokens; between them, the clauses of the
    removed middle that hold facts, as far as they fit. At most `budget_tokens` tokens; "" where not even the marker
    fits. A text within the budget comes back as it is."""
    total = count(text)
    if total <= budget_tokens:
        return Short(text, 0)
    if budget_tokens <= 0 or count(marker(total)) > budget_tokens:
        return Short("", total)
    per_token = max(1.0, len(text) / max(1, total))
    room = (budget_tokens - count(marker(total)) - 2) * per_token
    middle = ""
    if budget_tokens >= 64:
        from compression.extract import choose, statements_in

        cut = int(room * (1 - MIDDLE_SHARE))
        hidden = text[int(cut * HEAD_SHARE) : len(text) - int(cut * (1 - HEAD_SHARE))]
        middle = choose(statements_in([hidden]), budget_tokens=int(MIDDLE_SHARE * budget_tokens), count=count)
        room -= len(middle)
    for _ in range(12):
        head, tail = _ends(text, max(0, int(room)))
        removed = max(0, total - sum(count(part) for part in (head, middle, tail) if part))
        parts = [head, marker(removed), middle, "…" if middle else "", tail]
        cut_text = "\n".join(part for part in parts if part)
        if count(cut_text) <= budget_tokens:
            return Short(cut_text, removed)
        room = room * 0.85 - per_token
        if room <= 0:
            middle = ""
    return Short(marker(total), total)


def _ends(text: str, room: int) -> tuple[str, str]:
    """Head and tail of `room` characters together, cut at spaces where there are any near."""
    head = text[: int(room * HEAD_SHARE)]
    tail_size = room - len(head)
    tail = text[len(text) - tail_size :] if tail_size > 0 else ""
    if (space := head.rfind(" ", int(len(head) * 0.8))) > 0:
        head = head[:space]
    if (space := tail.find(" ", 0, max(1, int(len(tail) * 0.2)))) >= 0:
        tail = tail[space + 1 :]
    return head, tail
