"""Collects the pieces of an answer into its items, in the order they came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from compression.conversation import Item
from gateway.sessions.items import function_call, message, reasoning
from gateway.sessions.run import Piece


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Answer:
    """Text, reasoning and tool calls of one answer as they arrive."""

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}

    def add(self, piece: Piece) -> None:
        if piece.kind == "content":
            self._text.append(piece.text)
        elif piece.kind == "reasoning":
            self._reasoning.append(piece.text)
        else:
            call = self._calls.get(piece.index)
            if call is None:
                call = self._calls[piece.index] = _Call(piece.id or self._new_id("call"), piece.name or "")
            call.name = call.name or (piece.name or "")
            call.arguments.append(piece.text)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def has_reasoning(self) -> bool:
        return bool(self._reasoning)

    def items(self, *, complete: bool) -> tuple[Item, ...]:
        """Reasoning, message, calls. A call cut short is kept as text, because no output could ever answer it."""
        text, calls = self.text, list(self._calls.values())
        if not complete and calls:
            text += "".join(f"{c.name}({''.join(c.arguments)}" for c in calls)
            calls = []
        out: list[Item] = []
        if self._reasoning:
            out.append(reasoning("".join(self._reasoning)))
        if text or not calls:
            part = {"type": "output_text", "text": text, "annotations": []}
            status = "completed" if complete else "incomplete"
            out.append(message("assistant", [part], id=self._new_id("msg"), status=status))
        out += [function_call(c.id, c.name, "".join(c.arguments)) for c in calls]
        return tuple(out)
