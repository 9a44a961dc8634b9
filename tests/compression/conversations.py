"""Turns for the tests of guard, extract and summarize, written short."""

from __future__ import annotations

import json

from compression.conversation import Item, Turn


def message(role: str, text: str) -> Item:
    return Item("message", {"type": "message", "role": role, "content": text})


def called(name: str, arguments: object, output: object, call_id: str = "c1") -> tuple[Item, Item]:
    """A tool call and what it returned; dicts and lists become JSON."""
    return (
        Item(
            "function_call", {"type": "function_call", "name": name, "call_id": call_id, "arguments": _json(arguments)}
        ),
        Item("function_call_output", {"type": "function_call_output", "call_id": call_id, "output": _json(output)}),
    )


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def turn(number: int, user: str, assistant: str = "", *between: Item) -> Turn:
    answer = (message("assistant", assistant),) if assistant else ()
    return Turn(
        f"t{number}",
        f"t{number - 1}" if number else None,
        number,
        "completed",
        (message("user", user),),
        (*between, *answer),
    )


def talk(*pairs: tuple[str, str]) -> list[Turn]:
    return [turn(number, user, assistant) for number, (user, assistant) in enumerate(pairs)]


def count(text: str) -> int:
    """A stand-in for a tokenizer: a token for each four Latin characters, one for each wide character."""
    wide = sum(1 for char in text if ord(char) > 0x2E7F)
    return wide + (len(text) - wide + 3) // 4
