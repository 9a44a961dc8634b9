"""From generated ids to text that may be sent: no half character, no stop string, no special token. Knows no engine.

An answer that goes on elsewhere is read again from its first id: the same ids hold back the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

HALF = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are no whole character yet
CONTEXT_IDS = 6  # prompt ids decoded in front of the first generated one, so that its leading space is kept
MAX_WAITING_IDS = 16  # a character has at most 4 bytes, 16 ids that spell none never will


class IdsToText:
    """Text of a growing list of ids, as `decode` reads them.

    ids   | context | read, sent | not sent yet |
          start     ^ read                        two short decodes a token, whatever the length
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_tail: Seq[int] = ()) -> None:
        self._decode = decode
        context = list(prompt_tail[-CONTEXT_IDS:])
        if context and decode(context).endswith(HALF):
            context = []
        self._ids = context
        self._read = len(context)

    def push(self, token_id: int) -> str:
        """The text that became certain."""
        self._ids.append(token_id)
        return self._grown(final=False)

    def flush(self) -> str:
        """The rest, an incomplete character as U+FFFD."""
        return self._grown(final=True)

    def _grown(self, *, final: bool) -> str:
        before = self._decode(self._ids[: self._read]) if self._read else ""
        now = self._decode(self._ids)
        waiting = len(self._ids) - self._read
        if len(now) <= len(before) or (now.endswith(HALF) and not final and waiting < MAX_WAITING_IDS):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return now[len(before) :]


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    stop: str | None = None  # the stop string that was met


class TextStream:
    """`IdsToText` with stop strings: what may be the beginning of one is held back."""

    def __init__(self, decode: Callable[[list[int]], str], *, stops: Seq[str] = (), prompt_tail: Seq[int] = ()) -> None:
        self._text = IdsToText(decode, prompt_tail)
        self._stops = tuple(stops)
        self._held = ""
        self._owed = ""  # certain, and not told where the answer began
        self._skipped = 0  # characters that were told there and are not certain here yet
        self.met: str | None = None  # the stop string that was met

    def resume(self, ids: Seq[int], chars: int) -> str:
        """Read the ids of an answer that began elsewhere, and of which `chars` characters were told -> all that is
        certain of them.

        What of it lies beyond `chars` comes with the next `push` or `flush`; `met` says whether the answer was over.
        """
        said = ""
        for token_id in ids:
            said += self._passed(self._text.push(token_id)).text
            if self.met is not None:
                break
        self._owed, self._skipped = said[chars:], max(0, chars - len(said))
        return said

    def push(self, token_id: int) -> Piece:
        return self._beyond(self._passed(self._text.push(token_id)))

    def flush(self) -> Piece:
        """The end has come: nothing is held back any more."""
        if self.met is not None:
            return self._beyond(Piece("", self.met))
        piece = self._passed(self._text.flush())
        held, self._held = self._held, ""
        return self._beyond(piece if piece.stop is not None else Piece(piece.text + held))

    def _beyond(self, piece: Piece) -> Piece:
        """With what is owed, without what was told elsewhere."""
        if not self._owed and not self._skipped:
            return piece
        text, self._owed = self._owed + piece.text, ""
        told = min(self._skipped, len(text))
        self._skipped -= told
        return Piece(text[told:], piece.stop)

    def _passed(self, new: str) -> Piece:
        if not self._stops:
            return Piece(new)
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.met = min(found)
            self._held = ""
            return Piece(text[:at], self.met)
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return Piece(text[: len(text) - held])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
