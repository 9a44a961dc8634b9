"""Reads what an engine streams into pieces of an answer, and keeps the ids and the usage.

By ids, the family's parser finds content, reasoning and tool calls in the generated ids; a plain family's text is the
engine's own. By chat, the engine's parser has done it.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Mapping

from engines.contract import Delta, FinishReason, TokenLogprob, Usage
from gateway.sessions.answer import AnswerParser, AnswerPiece
from gateway.sessions.answer_items import Answer
from gateway.sessions.continuation import Begun
from gateway.sessions.run import Piece

_TEXT_ONLY = Delta()[2:]  # of a delta that adds ids and text and nothing else


class AnswerReader:
    def __init__(self, parser: AnswerParser | None, new_id: Callable[[str], str]) -> None:
        self._parser = parser
        self._new_id = new_id
        self._call_ids: dict[int, str] = {}
        self._ids = array.array("I")
        self.answer = Answer(new_id)
        self.usage: Usage | None = None
        self.finish: FinishReason | None = None
        self.started = False
        self._texts: list[str] = []  # text as the engine let it out
        self._known_calls: Mapping[int, str] = {}  # ids of calls that another gateway has told

    @property
    def begun(self) -> Begun:
        """The answer so far, for whoever goes on with it."""
        return Begun(self.ids, "".join(self._texts))

    @property
    def ids(self) -> bytes:
        """Every generated id, u32 little-endian."""
        return self._ids.tobytes()

    @property
    def id_list(self) -> list[int]:
        return self._ids.tolist()

    @property
    def num_ids(self) -> int:
        return len(self._ids)

    @property
    def call_ids(self) -> Mapping[int, str]:
        """Index -> id of the tool calls that were told."""
        return self._call_ids

    def resume(self, begun: Begun, call_ids: Mapping[int, str]) -> list[Piece]:
        """Read an answer again that began elsewhere: the pieces that were told of it there."""
        self._known_calls = call_ids
        ids = array.array("I")
        ids.frombytes(begun.ids)
        return self.push(Delta(begun.told, tuple(ids)))

    def push(self, delta: Delta) -> list[Piece]:
        if delta.ids:
            self._ids.extend(delta.ids)
            self.started = True
        if self._parser is None and delta[2:] == _TEXT_ONLY and delta.text:  # nearly every chunk of a plain family
            self.started = True
            self._texts.append(delta.text)
            piece = Piece("content", delta.text)
            self.answer.add(piece)
            return [piece]
        if delta.text:
            self._texts.append(delta.text)
        if delta.usage is not None:
            self.usage = delta.usage
        pieces = self._parsed(delta) if self._parser is not None else self._told(delta)
        if delta.finish is not None:
            self.finish = delta.finish
        if pieces:
            self.started = True
        for piece in pieces:
            self.answer.add(piece)
        return pieces

    def flush(self) -> list[Piece]:
        """What a parser still held when the answer was cut short."""
        pieces = self._numbered(self._parser.finish(cut=True), ()) if self._parser is not None else []
        for piece in pieces:
            self.answer.add(piece)
        return pieces

    @property
    def finish_reason(self) -> str | None:
        if self.finish == "stop" and self.answer.has_calls:
            return "tool_calls"
        return self.finish

    def _parsed(self, delta: Delta) -> list[Piece]:
        assert self._parser is not None
        parsed = self._parser.push(delta.ids, delta.text) if delta.ids or delta.text else []
        if delta.finish is not None:
            parsed = [*parsed, *self._parser.finish(cut=delta.stop is not None)]
        return self._numbered(parsed, delta.logprobs)

    def _numbered(self, parsed: Iterable[AnswerPiece], logprobs: tuple[TokenLogprob, ...]) -> list[Piece]:
        pieces = []
        for p in parsed:
            fresh = p.kind == "tool_call" and p.index not in self._call_ids
            if fresh:
                self._call_ids[p.index] = self._known_calls.get(p.index) or p.id or self._new_id("call")
            text = p.arguments if p.kind == "tool_call" else p.text
            pieces.append(Piece(p.kind, text, p.index, self._call_ids[p.index] if fresh else None, p.name, logprobs))
            logprobs = ()
        if logprobs:
            pieces.append(Piece("content", "", logprobs=logprobs))
        return pieces

    def _told(self, delta: Delta) -> list[Piece]:
        pieces = []
        if delta.reasoning:
            pieces.append(Piece("reasoning", delta.reasoning))
        if delta.text or delta.logprobs:
            pieces.append(Piece("content", delta.text, logprobs=delta.logprobs))
        for call in delta.tool_calls:
            fresh = call.index not in self._call_ids
            if fresh:
                self._call_ids[call.index] = call.id or self._new_id("call")
            shown = self._call_ids[call.index] if fresh else None
            pieces.append(Piece("tool_call", call.arguments, call.index, shown, call.name))
        return pieces
