"""gpt-oss answers: messages with a channel each."""

from __future__ import annotations

import re
from typing import Literal

from gateway.sessions.calls import Call, read_object
from gateway.sessions.readers import AnswerPiece, Calls, Splitter


class HarmonyReader:
    """Messages with a header, a channel and a body: analysis is reasoning, final content, functions.* a call (gpt-oss).

    assistant<|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final<|message|>..<|return|>
    """

    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    marks: frozenset[str] = frozenset({*ENDS, "<|message|>", "<|channel|>", "<|constrain|>"})
    _RECIPIENT = re.compile(r"to=(\S+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    def __init__(self, before: str) -> None:
        self._splitter = Splitter()
        self._calls = Calls()
        begun = before.rsplit("<|start|>", 1)[-1] if "<|start|>" in before else ""
        header, message, body = begun.partition("<|message|>")
        self._header = header.removeprefix("assistant")  # what stands before a message is its author
        self._in_body = bool(message)
        self._call = body if message and self._recipient is not None else ""

    def read(self, text: str) -> list[AnswerPiece]:
        self._splitter.rest += text
        return self._run(last=False)

    def finish(self) -> list[AnswerPiece]:
        pieces = self._run(last=True)
        if self._in_body:
            return pieces + self._end_body()
        text = self._header.removeprefix("assistant")
        return pieces if "<|" in text or not text.strip() else [*pieces, AnswerPiece("content", text)]

    def _run(self, *, last: bool) -> list[AnswerPiece]:
        pieces: list[AnswerPiece] = []
        while True:
            text, mark = self._splitter.take(self.ENDS if self._in_body else ("<|message|>", "<|start|>"), last=last)
            if not self._in_body:
                self._header = "" if mark == "<|start|>" else self._header + text
                self._in_body = mark == "<|message|>"
            elif self._recipient is not None:
                self._call += text
            elif text:
                pieces.append(AnswerPiece(self._kind, text))
            if mark is None:
                return pieces
            if mark in self.ENDS and self._in_body:
                pieces += self._end_body()
                self._header = ""

    @property
    def _recipient(self) -> str | None:
        found = self._RECIPIENT.search(self._header)
        return found[1].split("<|")[0] if found else None

    @property
    def _kind(self) -> Literal["content", "reasoning"]:
        channel = self._CHANNEL.search(self._header)
        return "reasoning" if channel is not None and channel[1] == "analysis" else "content"

    def _end_body(self) -> list[AnswerPiece]:
        self._in_body = False
        recipient, body = self._recipient, self._call
        self._call = ""
        if recipient is None:
            return []
        arguments = read_object(body)
        if arguments is None:
            return (
                [AnswerPiece("content", f"{self._header.removeprefix('assistant')}<|message|>{body}")] if body else []
            )
        return self._calls.pieces([Call(recipient.removeprefix("functions."), arguments)])
