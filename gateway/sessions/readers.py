"""Readers of answer formats: text with its control tokens readable, in any slices, to AnswerPieces.

A reader gives the same pieces, joined, however its input is sliced. Knows no ids.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.sessions.calls import Call, read_call, read_calls, read_list, read_named


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer. A tool call is one piece: `index` from 0, `name`, `arguments` (JSON text).

    `id` of a call: the model's own, where its format has one; None otherwise.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str = ""
    index: int = 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Reader(Protocol):
    """`marks`: special tokens that it wants to see; the others never reach it."""

    marks: frozenset[str]

    def read(self, text: str) -> list[AnswerPiece]: ...

    def finish(self) -> list[AnswerPiece]: ...


class PlainReader:
    """All is content."""

    marks: frozenset[str] = frozenset()

    def read(self, text: str) -> list[AnswerPiece]:
        return [AnswerPiece("content", text)]

    def finish(self) -> list[AnswerPiece]:
        return []


class Splitter:
    """Finds marks in sliced text: `take` gives text before the first mark and the mark, holding back half a mark."""

    def __init__(self) -> None:
        self.rest = ""

    def take(self, marks: Sequence[str], *, last: bool = False) -> tuple[str, str | None]:
        """(text, mark) and both are consumed; mark None where there is none yet, and text may be empty."""
        if not any(mark[0] in self.rest for mark in marks):  # the usual slice
            text, self.rest = self.rest, ""
            return text, None
        found = [(at, mark) for mark in marks if (at := self.rest.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            text, self.rest = self.rest[:at], self.rest[at + len(mark) :]
            return text, mark
        held = 0 if last else max((_overlap(self.rest, mark) for mark in marks), default=0)
        cut = len(self.rest) - held
        text, self.rest = self.rest[:cut], self.rest[cut:]
        return text, None


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


class Trimmed:
    """Text of one kind without the white space that a format puts around it.

    Leading white space goes where the format put it, trailing white space waits for what comes.
    """

    def __init__(self, kind: Literal["content", "reasoning"], *, lead: bool) -> None:
        self.kind = kind
        self.lead = lead  # strip what comes first
        self._held = ""

    def add(self, text: str) -> list[AnswerPiece]:
        text = self._held + text
        if self.lead:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if not kept:
            return []
        self.lead = False
        return [AnswerPiece(self.kind, kept)]

    def end(self, *, keep: bool) -> list[AnswerPiece]:
        """`keep`: nothing of the format followed, so the white space was the model's own."""
        held, self._held = self._held, ""
        return [AnswerPiece(self.kind, held)] if keep and held else []


class Calls:
    """Numbers the calls of one answer."""

    def __init__(self) -> None:
        self.count = 0

    def pieces(self, calls: Sequence[Call]) -> list[AnswerPiece]:
        first, self.count = self.count, self.count + len(calls)
        return [
            AnswerPiece("tool_call", index=first + n, id=call.id, name=call.name, arguments=call.arguments)
            for n, call in enumerate(calls)
        ]


class MarkedReader:
    """`<think>` .. `</think>` and calls between two marks, or from a mark to the end (Qwen, Hermes, SmolLM3, Mistral).

    `opened`: the prompt ends in `<think>`, so the answer begins within it.
    """

    def __init__(self, *, thinks: bool, opened: bool, calls: tuple[str, str | None] | None) -> None:
        self._open = (("<think>",) if thinks else ()) + ((calls[0],) if calls else ())
        self._call_close = calls[1] if calls else None
        self.marks = frozenset({*self._open, "</think>", self._call_close or "</think>", "[ARGS]", "[CALL_ID]"})
        self._splitter = Splitter()
        self._calls = Calls()
        self._content = Trimmed("content", lead=opened)
        self._reasoning = Trimmed("reasoning", lead=True)
        self._state: Literal["content", "reasoning", "call"] = "reasoning" if opened else "content"
        self._call = ""

    def read(self, text: str) -> list[AnswerPiece]:
        self._splitter.rest += text
        return self._run(last=False)

    def finish(self) -> list[AnswerPiece]:
        pieces = self._run(last=True)
        if self._state == "call":
            pieces += self._end_call(closed=False)
        pieces += self._reasoning.end(keep=self._state == "reasoning")
        return pieces + self._content.end(keep=self._calls.count == 0)

    def _run(self, *, last: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        while True:
            state = self._state
            marks = {"content": self._open, "reasoning": ("</think>",), "call": self._closing}[state]
            text, mark = self._splitter.take(marks, last=last)
            if state == "call":
                self._call += text
            else:
                pieces += (self._content if state == "content" else self._reasoning).add(text)
            if mark is None:
                return pieces
            pieces += self._turn(mark)

    @property
    def _closing(self) -> tuple[str, ...]:
        return () if self._call_close is None else (self._call_close,)

    def _turn(self, mark: str) -> list[AnswerPiece]:
        """Go into the state that a mark opens."""
        if mark == "<think>":
            self._state = "reasoning"
            return []
        if mark == "</think>":
            self._state = "content"
            self._content.lead = True
            return self._reasoning.end(keep=False)
        if self._state == "content":
            self._state, self._call = "call", ""
            return []
        return self._end_call(closed=True)

    def _end_call(self, *, closed: bool) -> list[AnswerPiece]:
        self._state = "content"
        calls = self._parsed()
        if calls is None:
            raw = self._open[-1] + self._call + ((self._call_close or "") if closed else "")
            return self._content.add(raw)
        dropped = self._content.end(keep=False)
        self._content.lead = True
        return [*dropped, *self._calls.pieces(calls)]

    def _parsed(self) -> list[Call] | None:
        if self._call_close is None:
            return read_list(self._call) or read_named(self._call)
        call = read_call(self._call)
        return None if call is None else [call]


class JsonReader:
    """An answer that is a call, and nothing else, is JSON from its first character on (Llama 3).

    `<|python_tag|>` may stand before it. `names` are the tools': JSON that calls none of them is content.
    """

    TAG = "<|python_tag|>"
    marks: frozenset[str] = frozenset({TAG})
    _HEAD = re.compile(r'\s*(\{\s*("(n(a(m(e("\s*)?)?)?)?)?)?)?')  # what may still become a call
    _CALL = re.compile(r'\s*\{\s*("name"\s*:|"[pt])')  # "parameters", "type"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: list[str] | None = []
        self._likely = False
        self._calls = Calls()

    def read(self, text: str) -> list[AnswerPiece]:
        if self._held is None:
            return [AnswerPiece("content", text)]
        self._held.append(text)
        if self._likely:
            return []
        held = "".join(self._held)
        body = held.removeprefix(self.TAG)
        self._likely = self._CALL.match(body) is not None
        if self._likely or self.TAG.startswith(held) or self._HEAD.fullmatch(body):
            return []
        return self._give_up()

    def finish(self) -> list[AnswerPiece]:
        if not self._held:
            return []
        calls = read_calls("".join(self._held).removeprefix(self.TAG), known=self._names)
        return self._give_up() if calls is None else self._calls.pieces(calls)

    def _give_up(self) -> list[AnswerPiece]:
        held, self._held = "".join(self._held or ()), None
        return [AnswerPiece("content", held)] if held else []
