"""What a conversation is made of: items, turns, and the path of turns that is its history.

An Item is one entry of a conversation in the shape of OpenAI's Responses API; items are the truth, token ids a
derived copy. A Turn is one exchange: what came in, and what was answered. Turns form a tree; a history is a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ItemType = Literal["message", "function_call", "function_call_output", "reasoning"]
TurnStatus = Literal["in_progress", "completed", "incomplete", "failed"]


@dataclass(frozen=True, slots=True)
class Item:
    """`payload` is the whole JSON object, `type` included, as it was received or generated."""

    type: ItemType
    payload: Mapping[str, Any]

    @property
    def role(self) -> str | None:
        role = self.payload.get("role")
        return role if isinstance(role, str) else None

    @property
    def text(self) -> str:
        """Everything readable in the item, joined; images and files count for nothing here."""
        if self.type == "function_call":
            return str(self.payload.get("arguments", ""))
        if self.type == "function_call_output":
            return _content_text(self.payload.get("output"))
        return _content_text(self.payload.get("content"))


def _content_text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange. `output` is empty until it was answered, and partial while `status` is incomplete."""

    id: str
    parent_id: str | None
    seq: int
    status: TurnStatus
    input: tuple[Item, ...]
    output: tuple[Item, ...] = ()

    @property
    def items(self) -> Iterator[Item]:
        yield from self.input
        yield from self.output


def open_calls(items: Iterable[Item]) -> dict[str, str]:
    """Tool calls that no output has answered yet: call id -> function name."""
    waiting: dict[str, str] = {}
    for item in items:
        if item.type == "function_call":
            waiting[item.payload["call_id"]] = item.payload["name"]
        elif item.type == "function_call_output":
            waiting.pop(item.payload["call_id"], None)
    return waiting
