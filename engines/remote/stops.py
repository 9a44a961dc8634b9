"""Stop strings watched for on this side, for servers that tell a stop string's first letters before they know it.

    text so far     "one tw"      let out: "one "      held: "tw", for "two" may be starting
    + "o three"     "two" found   let out: nothing     the answer ends before it

Knows no tokens and no server.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopWatch:
    """Reads an answer's text in pieces and lets out what is certainly none of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may go out now. After `matched` is set, nothing more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda each: (each[0], -len(each[1])))
            self._held = ""
            return text[:at]
        keep = max(_starting(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was still held when the answer ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def rest_before(self, stop: str) -> str:
        """What was still held and stands before `stop`, of which the server told at most the beginning."""
        held = self.rest()
        return held[: len(held) - _starting(held, stop)]


def _starting(text: str, stop: str) -> int:
    """Characters at the end of `text` that are a beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
