"""Generated ids as text while they come, control tokens apart, and never more than the engine let out.

    ids        51 90 2 ..      DecodeStream      "Hel" "lo" Control("<|im_end|>")
    engine     "Hel"           release           "Hel"                      the rest waits: a stop string may begin

An engine that stops at a stop string has generated ids past the cut, and its text says where the cut is. What the ids
read as is therefore held until the engine's text reaches it; what was never reached is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from gateway.sessions.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Control:
    """A control token by its name. `special`: the engine's text leaves it out."""

    name: str
    special: bool


class TextStream:
    """Turns ids into text and Controls. `special_in_text`: the engine's text holds special tokens too."""

    def __init__(self, vocabulary: Vocabulary, *, special_in_text: bool = False) -> None:
        self._vocabulary = vocabulary
        self._stream = DecodeStream(skip_special_tokens=False)
        self._unread: list[int] = []  # ids of a character that is not complete
        self._waiting: deque[str | Control] = deque()
        self._released: int | None = 0  # characters that may go out; None: all
        self._special_in_text = special_in_text

    def push(self, ids: Sequence[int], text: str | None = None) -> Iterator[str | Control]:
        """What these ids add. `text`: what the engine let out with them; None where it holds nothing back."""
        for id in ids:
            self._read(id)
        if text is None:
            self._released = None
        elif self._released is not None:
            self._released += len(text)
        return self._release()

    def finish(self, *, cut: bool = False) -> Iterator[str | Control]:
        """The rest. `cut`: a stop string ended the answer, so what was not let out by now never will be."""
        if self._unread:
            self._waiting.append(self._vocabulary.decode(self._unread))
            self._unread.clear()
        if not cut:
            self._released = None
        return self._release()

    def _read(self, id: int) -> None:
        name = self._vocabulary.name_of(id)
        chunk = self._stream.step(self._vocabulary.tokenizer, id)
        if name is None:
            if chunk is None:
                self._unread.append(id)
            else:
                self._unread.clear()
                self._waiting.append(chunk)
            return
        self._unread.clear()
        if chunk is not None and (before := chunk.removesuffix(name)):
            self._waiting.append(before)
        self._waiting.append(Control(name, name in self._vocabulary.special))

    def _release(self) -> Iterator[str | Control]:
        waiting = self._waiting
        while waiting:
            item = waiting[0]
            if isinstance(item, Control):
                cost = len(item.name) if self._special_in_text or not item.special else 0
                if self._released is not None:
                    if cost > self._released:
                        return
                    self._released -= cost
                yield waiting.popleft()
            elif self._released is None or len(item) <= self._released:
                if self._released is not None:
                    self._released -= len(item)
                waiting.popleft()
                yield item
            else:
                if self._released:
                    waiting[0] = item[self._released :]
                    yield item[: self._released]
                    self._released = 0
                return
