"""Items show their text; turns show their items."""

from __future__ import annotations

from compression.conversation import Item, Turn


def test_an_item_reads_its_text_whatever_its_type() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png,x"}]
    assert Item("message", {"type": "message", "role": "user", "content": parts}).text == "a"
    assert Item("message", {"type": "message", "role": "user", "content": "plain"}).text == "plain"
    assert Item("function_call", {"type": "function_call", "arguments": "{}"}).text == "{}"
    assert Item("function_call_output", {"type": "function_call_output", "output": "42"}).text == "42"
    assert Item("reasoning", {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}).text == "hm"
    assert Item("reasoning", {"type": "reasoning"}).text == ""
    assert Item("reasoning", {"type": "reasoning"}).role is None


def test_a_turn_holds_what_came_in_and_then_what_was_answered() -> None:
    asked = Item("message", {"type": "message", "role": "user", "content": "q"})
    answered = Item("message", {"type": "message", "role": "assistant", "content": "a"})
    turn = Turn("t", None, 1, "completed", (asked,), (answered,))
    assert [item.role for item in turn.items] == ["user", "assistant"]
