"""Answers in the format that a tokenizer declares (`response_template`), read by transformers' streaming parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from gateway.sessions.calls import Call
from gateway.sessions.readers import AnswerPiece, Calls, Trimmed

# Marks begin with one of these: fed so, a region that fails to parse never takes text before it along.
_RUNS = re.compile(r"[<\[{|]|[^<\[{|]+")


class TemplateReader:
    """What the tokenizer's `response_template` declares, read by transformers' streaming parser.

    A region that fails to parse comes out as it was written, and all that follows it as content.
    """

    REASONING: ClassVar[frozenset[str]] = frozenset({"thinking", "reasoning", "reasoning_content"})

    def __init__(
        self,
        declared: Mapping[str, Any],
        before: str,
        tools: Sequence[Mapping[str, Any]],
        controls: Collection[str],
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # heavy: only for models that declare a format

        written = json.dumps(declared, ensure_ascii=False)
        self.marks = frozenset(name for name in controls if name in written or re.escape(name) in written)
        parser = ResponseParser(dict(declared), prefix=before, tools=[dict(tool) for tool in tools])
        self._feed: Callable[[str], list[dict[str, Any]]] | None = parser.feed
        self._finalize: Callable[[], tuple[dict[str, Any], list[dict[str, Any]]]] = parser.finalize
        self._trimmed = {"content": Trimmed("content", lead=True), "reasoning": Trimmed("reasoning", lead=True)}
        self._calls = Calls()
        fields: Mapping[str, Mapping[str, Any]] = declared["fields"]
        self._marked = {name for name, field in fields.items() if "open" in field or "open_pattern" in field}
        self._unparsed = ""  # fed, and neither given out nor a mark

    def read(self, text: str) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        for run in _RUNS.findall(text):
            if self._feed is None:
                pieces.append(AnswerPiece("content", run))
                continue
            self._unparsed += run
            try:
                pieces += self._pieces(self._feed(run))
            except (ValueError, TypeError, KeyError):
                pieces += self._give_up()
        return pieces

    def finish(self) -> list[AnswerPiece]:
        if self._feed is None:
            return []
        try:
            pieces = self._pieces(self._finalize()[1])
        except (ValueError, TypeError, KeyError):
            return self._give_up()
        return pieces + self._trimmed["content"].end(keep=self._calls.count == 0)

    def _give_up(self) -> list[AnswerPiece]:
        self._feed = None
        held, self._unparsed = self._unparsed, ""
        return [AnswerPiece("content", held)] if held else []

    def _pieces(self, events: Sequence[Mapping[str, Any]]) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        for event in events:
            field, kind = event["field"], event["type"]
            trimmed = self._trimmed["reasoning" if field in self.REASONING else "content"]
            if field == "tool_calls":
                if kind == "region_close":
                    pieces += self._calls.pieces(_declared_calls(event["value"]))
                    self._unparsed = ""
            elif kind == "region_chunk":
                pieces += trimmed.add(event["text"])
                self._unparsed = self._unparsed[len(event["text"]) :]
            else:
                if field in self._marked:
                    self._unparsed = ""
                if kind == "region_close":
                    trimmed.end(keep=False)
                    trimmed.lead = True
        return pieces


def _declared_calls(value: Any) -> list[Call]:
    """Calls of a parsed region. Raises ValueError where it is none."""
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        function = entry.get("function", entry) if isinstance(entry, Mapping) else {}
        name, arguments = function.get("name"), function.get("arguments", {})
        if not isinstance(name, str):
            raise ValueError("a tool call without a name")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(name, text, entry.get("id")))
    return calls
