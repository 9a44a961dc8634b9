"""What a method keeps of a conversation, and how many tokens of the model's prompt that takes.

The demonstration model's template has no tools, so that tool calls and their answers are counted (and read by the
model) as plain messages. What is rendered through the templates that have tools is the items themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from compression.conversation import Item, Turn
from gateway.sessions.tokens import ModelTokens

Write = Callable[[list[dict[str, Any]], int], Awaitable["Answer"]]  # messages, most tokens -> what the model wrote
Unit = tuple[Turn, ...]  # turns that go or stay together: a tool's call and its answer


@dataclass(frozen=True, slots=True)
class Answer:
    """`finished`: the model ended by itself."""

    text: str
    finished: bool
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """`items` after the system prompt; `system`: what the system prompt ends with, if something of the history does."""

    items: tuple[Item, ...]
    tokens: int
    system: str = ""

    @property
    def text(self) -> str:
        return "\n".join((self.system, *(item.text for item in self.items)))


def message(role: str, text: str) -> Item:
    return Item("message", {"type": "message", "role": role, "content": text})


def plain_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Chat messages for a template without tools."""
    said: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        if item.type == "function_call":
            names[item.payload["call_id"]] = item.payload["name"]
            said.append({"role": "assistant", "content": f"[calls {item.payload['name']} with {item.text}]"})
        elif item.type == "function_call_output":
            name = names.get(item.payload["call_id"], "a tool")
            said.append({"role": "user", "content": f"[{name} answered] {item.text}"})
        else:
            said.append({"role": item.role, "content": item.text})
    return said


class Sizer:
    """Tokens of items in the model's prompt. Its template adds one message after the other, so each is counted once."""

    def __init__(self, tokens: ModelTokens, system: str) -> None:
        self.tokens, self.system = tokens, system
        self._head = [{"role": "system", "content": system}]
        self.overhead = tokens.count_messages(self._head)  # system prompt and generation prompt
        self._known: dict[tuple[str, str], int] = {}

    def of(self, items: Iterable[Item]) -> int:
        return sum(self._one(said) for said in plain_messages(items))

    def _one(self, said: dict[str, Any]) -> int:
        key = (said["role"], said["content"])
        if key not in self._known:
            self._known[key] = self.tokens.count_messages([*self._head, said]) - self.overhead
        return self._known[key]

    def text(self, text: str) -> int:
        return self.tokens.count(text)

    def context(self, items: Iterable[Item], system: str = "") -> Context:
        kept = tuple(items)
        return Context(kept, self.overhead + self.of(kept) + (self.text(system) if system else 0), system)

    def prompt(self, context: Context, *more: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages of a context, and what is asked after it."""
        return [{"role": "system", "content": self.system + context.system}, *plain_messages(context.items), *more]


def open_calls(turn: Turn) -> bool:
    """The turn ends with a tool call that the next turn answers."""
    return any(item.type == "function_call" for item in turn.output)


def units(turns: Sequence[Turn]) -> list[Unit]:
    grouped: list[list[Turn]] = []
    for turn in turns:
        if grouped and open_calls(grouped[-1][-1]):
            grouped[-1].append(turn)
        else:
            grouped.append([turn])
    return [tuple(group) for group in grouped]


def items_of(group: Iterable[Turn]) -> tuple[Item, ...]:
    return tuple(item for turn in group for item in turn.items)
