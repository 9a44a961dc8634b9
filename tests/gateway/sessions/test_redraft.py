"""What stands where a part was cut out, and the number that says what is missing."""

from __future__ import annotations

import re
from typing import Any

import pytest

from compression.conversation import Item, Turn
from compression.plan import PlannedCut
from gateway.sessions.redraft import cut_out

LONG = "The report begins here. " + "And so it went on and on. " * 200 + "The report ends here."


def count(text: str) -> int:
    return len(text.split())


def turn(item: Item) -> Turn:
    return Turn("t1", None, 1, "completed", (item,))


def output(content: Any) -> Item:
    return Item("function_call_output", {"type": "function_call_output", "call_id": "c", "output": content})


@pytest.mark.parametrize(
    ("item", "kind", "budget"),
    [
        (output(LONG), "tool_output", 24),
        (Item("message", {"type": "message", "role": "user", "content": LONG}), "oversized", 200),
        (Item("message", {"type": "message", "role": "user", "content": LONG}), "oversized", 12),
    ],
)
def test_a_markers_number_is_that_of_the_elision(item: Item, kind: Any, budget: int) -> None:
    cut = cut_out(turn(item), PlannedCut("t1", "input", 0, kind, count(LONG) + 4, budget), count)
    number = re.search(r"(\d+) tokens", cut.text)
    assert number
    assert int(number[1]) == cut.tokens_removed > count(LONG) - budget


def test_the_tokens_of_an_image_are_those_removed_not_its_text() -> None:
    content = [{"type": "input_text", "text": "look at this"}, {"type": "input_image", "image_url": "x"}]
    item = Item("message", {"type": "message", "role": "user", "content": content})
    cut = cut_out(turn(item), PlannedCut("t1", "input", 0, "image", 768 + 7, 7 + 12), count)
    assert (cut.text, cut.tokens_removed) == ("[1 image left out]", 768)
