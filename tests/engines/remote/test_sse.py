# ruff: noqa: E501 - a table, one vector a line
"""The event stream parser against the standard's own rules and examples, whole and in every split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.remote.sse import Event, EventTooLarge, SseParser

# name, stream, [(event name, data, last id), ...]; the examples are those of WHATWG HTML 9.2.6
VECTORS = [
    ("three events of the standard", b": test\n\ndata: first\nid: 1\n\ndata:second\nid\n\ndata:  third\n\n",
     [("message", "first", "1"), ("message", "second", ""), ("message", " third", "")]),
    ("data of two lines", b"data: YHOO\ndata: +2\ndata: 10\n\n", [("message", "YHOO\n+2\n10", "")]),
    ("empty data is an event, an unfinished block is none", b"data\n\ndata\ndata\n\ndata:",
     [("message", "", ""), ("message", "\n", "")]),
    ("one space after the colon is dropped", b"data:test\n\ndata: test\n\n", [("message", "test", "")] * 2),
    ("CRLF", b"data: a\r\n\r\ndata: b\r\n\r\n", [("message", "a", ""), ("message", "b", "")]),
    ("CR", b"data: a\r\rdata: b\r\r", [("message", "a", ""), ("message", "b", "")]),
    ("a mix of line ends", b"data: a\ndata: b\rdata: c\r\n\ndata: d\n\r\n", [("message", "a\nb\nc", ""), ("message", "d", "")]),
    ("byte order mark", b"\xef\xbb\xbfdata: a\n\n", [("message", "a", "")]),
    ("a second byte order mark is part of a field name", b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [("message", "b", "")]),
    ("a byte order mark later is part of a field name", b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [("message", "a", "")]),
    ("comments", b": ping\n\n:\n\ndata: a\n: x\n\n", [("message", "a", "")]),
    ("event name", b"event: add\ndata: 1\n\ndata: 2\n\n", [("add", "1", ""), ("message", "2", "")]),
    ("an event name without data is no event, and is forgotten", b"event: add\n\ndata: 1\n\n", [("message", "1", "")]),
    ("id stays", b"id: 7\n\ndata: a\n\ndata: b\n\n", [("message", "a", "7"), ("message", "b", "7")]),
    ("an id with NUL is ignored", b"id: 1\ndata: a\n\nid: 2\0\ndata: b\n\n", [("message", "a", "1"), ("message", "b", "1")]),
    ("unknown fields, and names in other case", b"Data: x\nfoo: y\n data: z\ndata: a\n\n", [("message", "a", "")]),
    ("bad UTF-8 becomes U+FFFD", b"data: a\xff\xc3\n\n", [("message", "a\ufffd\ufffd", "")]),
    ("characters of four bytes", "data: 世界 😀 é\n\n".encode(), [("message", "世界 😀 é", "")]),
    ("colons in data", b'data: {"a": "b: c"}\n\n', [("message", '{"a": "b: c"}', "")]),
    ("NUL in data", b"data: a\0b\n\n", [("message", "a\0b", "")]),
    ("several whole events in one chunk", b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n",
     [("message", "1", ""), ("message", "2", ""), ("message", "[DONE]", "")]),
    ("blank lines between events", b"\n\n\ndata: 1\n\n\n\ndata: 2\n\n", [("message", "1", ""), ("message", "2", "")]),
]  # fmt: skip


def read(events: list[Event]) -> list[tuple[str, str, str]]:
    return [(event.name, event.text, event.id) for event in events]


@pytest.mark.parametrize(("stream", "expected"), [v[1:] for v in VECTORS], ids=[v[0] for v in VECTORS])
def test_a_stream_reads_as_the_standard_says_in_every_split(
    stream: bytes, expected: list[tuple[str, str, str]]
) -> None:
    assert read(SseParser().feed(stream)) == expected
    for at in range(len(stream) + 1):
        parser = SseParser()
        assert read(parser.feed(stream[:at]) + parser.feed(stream[at:])) == expected, f"split at {at}"
    parser = SseParser()
    assert read([event for byte in stream for event in parser.feed(bytes((byte,)))]) == expected


def naive(stream: bytes) -> list[tuple[str, str, str]]:
    """The standard's algorithm on the whole stream, line by line."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, data, name, last_id = [], [], "", ""
    for line in text.split("\n")[:-1]:
        if not line:
            if data:
                events.append((name or "message", "\n".join(data), last_id))
            data, name = [], ""
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            last_id = value
    return events


PIECES = st.sampled_from(
    [
        b"data: x",
        b"data:",
        b"data",
        b"event: e",
        b"id: 1",
        b"id",
        b": c",
        b"\n",
        b"\r",
        b"\r\n",
        b"\n\n",
        "é世".encode(),
    ]
)


@given(st.lists(PIECES, max_size=30), st.lists(st.integers(0, 200), max_size=8))
def test_any_stream_in_any_split_reads_as_the_whole_stream_line_by_line(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    borders = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    parser = SseParser()
    events = [e for a, b in pairwise(borders) for e in parser.feed(stream[a:b])]
    assert read(events) == naive(stream)
    plain = SseParser()
    data = [d for a, b in pairwise(borders) for d in plain.data_of(stream[a:b])]
    assert data == [event.data for event in events]


def test_retry_is_kept_and_anything_but_digits_ignored() -> None:
    parser = SseParser()
    parser.feed(b"retry: 1500\nretry: 2s\n\n")
    assert parser.retry_ms == 1500


@pytest.mark.parametrize(
    "stream",
    [b"data: " + b"x" * 200 + b"\n\n", b"data: x\n" * 60 + b"\n", b": " + b"c" * 200, b"x" * 200, b"event: " + b"e" * 200 + b"\n"],
    ids=["one line", "many lines", "comment", "no field", "event name"],
)  # fmt: skip
def test_an_event_over_the_bound_is_refused_before_it_is_complete(stream: bytes) -> None:
    for size in (len(stream), 7):
        parser = SseParser(max_event_bytes=100)
        with pytest.raises(EventTooLarge):
            feed_by(parser, stream, size)


def feed_by(parser: SseParser, stream: bytes, size: int) -> None:
    for at in range(0, len(stream), size):
        parser.feed(stream[at : at + size])


def test_many_events_over_the_bound_together_are_no_event_over_the_bound() -> None:
    assert len(SseParser(max_event_bytes=100).feed(b"data: x\n\n" * 1000)) == 1000
