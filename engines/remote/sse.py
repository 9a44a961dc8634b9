"""Server-sent events, read incrementally (WHATWG HTML, 9.2.6 "Interpreting an event stream").

Lines end in CR, LF or CRLF, mixed and split over chunks as they like; a byte order mark is dropped, comments are
skipped, several `data` lines are joined by LF; an event without its blank line at the end of the stream is no event.
Data stays bytes: JSON is parsed from bytes, and a character split over two chunks never meets a decoder. Knows no HTTP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 8 << 20
BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")
_ONE_EVENT = re.compile(rb"data: ([^\r\n]*)\n\n").fullmatch


class EventTooLarge(Exception):
    """One event, or one line of it, is larger than the bound."""


@dataclass(slots=True)
class Event:
    """`data` as sent (UTF-8 by the standard); `name` is the `event` field, `id` the last id seen on the stream."""

    data: bytes
    name: str = "message"
    id: str = ""

    @property
    def text(self) -> str:
        """The data decoded as the standard says: what is not UTF-8 becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


class SseParser:
    """Feed it chunks, get the events that are complete."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.retry_ms: int | None = None
        self._max = max_event_bytes
        self._started = False
        self._line: list[bytes] = []  # the pieces of a line whose end has not come
        self._line_size = 0
        self._after_cr = False  # the last chunk ended in CR: a LF at the start of the next belongs to it
        self._data: list[bytes] = []
        self._data_size = 0
        self._name = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """Events completed by `chunk`. Raises EventTooLarge."""
        if not self._started:
            chunk = self._drop_bom(chunk)
        if not chunk:
            return []
        if self._idle and chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and b"\r" not in chunk:
            return self._feed_whole(chunk)
        return self._feed_lines(chunk)

    def data_of(self, chunk: bytes) -> list[bytes]:
        """As `feed`, for a reader of data only. One whole `data: …` event, the usual case, costs least."""
        if (one := _ONE_EVENT(chunk)) is not None and self._started and self._idle and len(chunk) <= self._max:
            return [one[1]]
        return [event.data for event in self.feed(chunk)]

    @property
    def _idle(self) -> bool:
        return not (self._line or self._data or self._name or self._after_cr)

    def _feed_whole(self, chunk: bytes) -> list[Event]:
        """The usual case: the chunk is whole events, most of them one `data: …` line."""
        events: list[Event] = []
        for block in chunk[:-2].split(b"\n\n"):
            if block.startswith(b"data: ") and b"\n" not in block and len(block) <= self._max:
                events.append(Event(block[6:], id=self._id))
            else:
                events += self._feed_lines(block + b"\n\n")
        return events

    def _feed_lines(self, chunk: bytes) -> list[Event]:
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
        self._after_cr = chunk[-1:] == b"\r" if chunk else False
        events: list[Event] = []
        start = 0
        for end in _LINE_END.finditer(chunk):
            line = chunk[start : end.start()]
            start = end.end()
            if self._line:
                self._line.append(line)
                line = b"".join(self._line)
                self._line, self._line_size = [], 0
            if (event := self._take_line(line)) is not None:
                events.append(event)
        if start < len(chunk):
            self._line.append(chunk[start:])
            self._line_size += len(chunk) - start
            self._check(self._line_size)
        return events

    def _take_line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_size += len(value) + 1
            self._check(self._data_size)
        elif name == b"event":
            self._check(len(value))
            self._name = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._check(len(value))
            self._id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit():
            self.retry_ms = int(value[:9])
        return None

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._data_size, self._name = [], 0, ""
        if not data:
            return None
        return Event(b"\n".join(data), name or "message", self._id)

    def _drop_bom(self, chunk: bytes) -> bytes:
        head = b"".join(self._line) + chunk
        self._line, self._line_size = [], 0
        if len(head) < len(BOM) and BOM.startswith(head):
            self._line = [head] if head else []
            return b""
        self._started = True
        return head.removeprefix(BOM)

    def _check(self, size: int) -> None:
        if size > self._max:
            raise EventTooLarge(f"a server-sent event is larger than {self._max} bytes")
