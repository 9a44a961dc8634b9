"""A turn's events as OpenAI's Responses stream: items are announced, filled and closed. Knows no I/O.

    created, in_progress
    output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done, output_item.done
    completed | incomplete | failed

The same turn makes the same events with the same numbers, from 0, whenever and wherever its stream is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.api.responses.ids import named_output, output_id
from gateway.api.responses.items import shown
from gateway.api.responses.shapes import Standing, of_ended, of_started, status_of
from gateway.sessions.events import logprob_json
from gateway.sessions.run import Piece, TurnEnded, TurnStarted

Event = dict[str, Any]
KINDS = {"content": "message", "reasoning": "reasoning", "tool_call": "function_call"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}  # kind -> type of its one part
LAST = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete", "failed": "failed"}


@dataclass(slots=True)
class _Item:
    kind: str
    id: str
    index: int  # in the output
    call_id: str = ""
    name: str = ""
    text: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    open: bool = True

    @property
    def whole(self) -> str:
        return "".join(self.text)

    def part(self) -> dict[str, Any]:
        if self.kind == "message":
            return {"type": "output_text", "text": self.whole, "annotations": [], "logprobs": list(self.logprobs)}
        return {"type": "reasoning_text", "text": self.whole}

    def json(self, status: str) -> dict[str, Any]:
        told: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        content = [self.part()] if status != "in_progress" else []
        if self.kind == "message":
            return {**told, "role": "assistant", "content": content}
        if self.kind == "reasoning":
            return {**told, "summary": [], "content": content}
        return {**told, "call_id": self.call_id, "name": self.name, "arguments": self.whole}


class ResponseEvents:
    """`whole` makes the response's JSON of a Standing; `item` may add to a closed item what was asked for."""

    def __init__(
        self,
        response_id: Callable[[str], str],
        whole: Callable[[Standing], dict[str, Any]],
        *,
        now: Callable[[], float],
        finished: Callable[[dict[str, Any]], dict[str, Any]] = lambda item: item,
    ) -> None:
        self._response_id = response_id
        self._whole = whole
        self._now = now
        self._finished = finished
        self._standing: Standing | None = None
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}  # by the number of the call
        self._numbered = 0

    def of(self, happened: TurnStarted | Piece | TurnEnded) -> list[Event]:
        """The events that it makes, numbered."""
        if isinstance(happened, Piece):
            made = self._piece(happened)
        elif isinstance(happened, TurnStarted):
            made = self._started(happened)
        else:
            made = self._ended(happened)
        out = []
        for kind, fields in made:
            out.append({"type": kind, "sequence_number": self._numbered, **fields})
            self._numbered += 1
        return out

    @property
    def logprobs(self) -> list[Any]:
        return [told for item in self._items for told in item.logprobs]

    def _started(self, event: TurnStarted) -> Iterator[tuple[str, Event]]:
        self._standing = of_started(self._response_id(event.turn_id), event)
        told = self._whole(self._standing)
        yield "response.created", {"response": told}
        yield "response.in_progress", {"response": told}

    def _piece(self, piece: Piece) -> Iterator[tuple[str, Event]]:
        if piece.kind == "content" and not piece.text and not self._of_kind("message"):
            return  # logprobs of tokens that show nothing, before anything is shown
        item = self._item_of(piece)
        if item is None:
            for other in self._items:
                yield from self._close(other, "completed")
            item = self._add(piece)
            yield from self._announce(item)
        item.open = True
        item.text.append(piece.text)
        if item.kind == "function_call":
            item.name = item.name or (piece.name or "")
            if piece.text:
                yield "response.function_call_arguments.delta", {**_place(item), "delta": piece.text}
            return
        told: Event = {**_place(item), "content_index": 0, "delta": piece.text}
        if item.kind == "message":
            told["logprobs"] = [logprob_json(p) for p in piece.logprobs]
            item.logprobs += told["logprobs"]
        yield f"response.{PARTS[item.kind]}.delta", told

    def _ended(self, event: TurnEnded) -> Iterator[tuple[str, Event]]:
        assert self._standing is not None, "a turn's first event is its start"
        status = status_of(event.status, event.finish_reason)
        closing = "completed" if status == "completed" else "incomplete"
        for item in self._items:
            yield from self._close(item, closing)
        known = {item.id for item in self._items}
        for item_id, said in named_output(event.turn_id, event.output):
            if item_id not in known and status == "completed":
                yield from self._untold(item_id, shown(item_id, said))
        ended = of_ended(self._standing, event, self._now())
        yield f"response.{LAST[status]}", {"response": self._whole(ended)}

    def _untold(self, item_id: str, told: dict[str, Any]) -> Iterator[tuple[str, Event]]:
        """An item of the answer that no piece told of: an answer without a word."""
        item = _Item(told["type"], item_id, len(self._items), told.get("call_id", ""), told.get("name", ""))
        self._items.append(item)
        yield from self._announce(item)
        item.text.append(told.get("arguments", "") if item.kind == "function_call" else "")
        yield from self._close(item, "completed")

    def _of_kind(self, kind: str) -> _Item | None:
        return next((item for item in self._items if item.kind == kind), None)

    def _item_of(self, piece: Piece) -> _Item | None:
        return self._calls.get(piece.index) if piece.kind == "tool_call" else self._of_kind(KINDS[piece.kind])

    def _add(self, piece: Piece) -> _Item:
        assert self._standing is not None, "a turn's first event is its start"
        kind = KINDS[piece.kind]
        item_id = output_id(self._standing.turn_id, kind, len(self._calls) if kind == "function_call" else 0)
        item = _Item(kind, item_id, len(self._items), piece.id or "", piece.name or "")
        self._items.append(item)
        if kind == "function_call":
            self._calls[piece.index] = item
        return item

    def _announce(self, item: _Item) -> Iterator[tuple[str, Event]]:
        yield "response.output_item.added", {"output_index": item.index, "item": item.json("in_progress")}
        if item.kind in PARTS:
            yield "response.content_part.added", {**_place(item), "content_index": 0, "part": item.part()}

    def _close(self, item: _Item, status: str) -> Iterator[tuple[str, Event]]:
        if not item.open:
            return
        item.open = False
        if item.kind == "function_call":
            done = {**_place(item), "name": item.name, "arguments": item.whole}
            yield "response.function_call_arguments.done", done
        else:
            at: Event = {**_place(item), "content_index": 0}
            text: Event = {**at, "text": item.whole}
            if item.kind == "message":
                text["logprobs"] = list(item.logprobs)
            yield f"response.{PARTS[item.kind]}.done", text
            yield "response.content_part.done", {**at, "part": item.part()}
        finished = self._finished(item.json(status))
        yield "response.output_item.done", {"output_index": item.index, "item": finished}


def _place(item: _Item) -> Event:
    return {"item_id": item.id, "output_index": item.index}
