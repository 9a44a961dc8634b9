"""The engine's own publisher on real sockets: what it keeps, what it gives up, and that our feed reads it whole."""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from typing import Any

import pytest
import zmq
import zmq.asyncio

from engines.kv_events import EventBatch, FeedReset, KvEventsError
from engines.kv_snapshot import END, Head, SnapshotReader, encode_head, encode_part
from engines.kv_stream import KvStream
from engines.local.kv import events
from engines.local.kv.events import KvEndpointRefused, KvPublisher, beside
from engines.remote.kv_feed import FeedAddress, feed
from tests.engines.kv_publisher import stored

ANYWHERE = "tcp://127.0.0.1:0"
WAIT_S = 30.0


def now() -> float:
    return 1.0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await test

    asyncio.run(bounded())


def test_a_whole_replay_comes_without_a_hole() -> None:
    """Far more than a socket holds (REPLAY_HIGH_WATER), to a reader that begins late."""

    async def test() -> None:
        stream = KvStream(now)
        async with KvPublisher(stream, ANYWHERE) as publisher:
            for number in range(6000):
                stream.publish((stored(number),))
            async with aclosing(feed(FeedAddress(publisher.endpoint, publisher.replay))) as items:
                assert await anext(items) == FeedReset(0, "start", whole=True)
                for expected in range(6001):
                    item = await anext(items)
                    assert isinstance(item, EventBatch)
                    assert item.seq == expected

    run(test())


def test_a_client_that_asks_and_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "REPLAY_PATIENCE_S", 0.3)
    monkeypatch.setattr(events, "REPLAYS_AT_ONCE", 2)

    async def test() -> None:
        stream = KvStream(now)
        context = zmq.asyncio.Context()
        idle = []
        try:
            async with KvPublisher(stream, ANYWHERE) as publisher:
                batch = stored(*range(60))
                for _ in range(3000):
                    stream.publish((batch,))
                for _ in range(5):
                    dealer = context.socket(zmq.DEALER)
                    dealer.setsockopt(zmq.RCVHWM, 1)
                    dealer.setsockopt(zmq.RCVBUF, 4096)
                    dealer.connect(publisher.replay)
                    await dealer.send_multipart((b"", bytes(8)))
                    idle.append(dealer)
                await asyncio.sleep(0.1)
                async with aclosing(feed(FeedAddress(publisher.endpoint, publisher.replay))) as items:
                    assert await anext(items) == FeedReset(0, "start", whole=True)
        finally:
            context.destroy(linger=0)

    run(test())


def test_only_so_many_batches_and_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_BATCHES", 10)

    async def test() -> None:
        stream = KvStream(now)
        async with KvPublisher(stream, ANYWHERE) as publisher:
            for number in range(30):
                stream.publish((stored(number),))
            assert [seq for seq, _ in publisher._kept] == list(range(21, 31))
            assert publisher._kept_bytes == sum(len(payload) for _, payload in publisher._kept)
            monkeypatch.setattr(events, "KEEP_BYTES", 1000)
            stream.publish((stored(*range(100)),))
            stream.publish((stored(1),))
            assert [seq for seq, _ in publisher._kept] == [32]

    run(test())


def test_over_a_socket_file_the_replay_lies_beside_it(tmp_path: Any) -> None:
    async def test() -> None:
        endpoint = f"ipc://{tmp_path}/kv"
        stream = KvStream(now)
        async with KvPublisher(stream, endpoint) as publisher:
            assert (publisher.endpoint, publisher.replay) == (endpoint, f"{endpoint}.replay")
            stream.publish((stored(1),))
            async with aclosing(feed(FeedAddress(publisher.endpoint, publisher.replay))) as items:
                await anext(items)
                await anext(items)
                item = await anext(items)
                assert isinstance(item, EventBatch)
                assert item.events == (stored(1),)

    run(test())


def test_a_place_that_is_taken_is_refused_and_nothing_stays_open() -> None:
    async def test() -> None:
        async with KvPublisher(KvStream(now), ANYWHERE) as first:
            for taken in ((first.endpoint, None), (ANYWHERE, first.endpoint)):
                with pytest.raises(KvEndpointRefused, match="cannot be published at"):
                    async with KvPublisher(KvStream(now), taken[0], replay=taken[1]):
                        pass

    run(test())


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://h", "tcp://h:x", "tcp://h:70000", "udp://h:1", "ipc://"])
def test_an_endpoint_is_tcp_with_a_port_or_ipc(endpoint: str) -> None:
    with pytest.raises(KvEndpointRefused):
        beside(endpoint)


HEAD = Head(7, 1.5, bytes(range(32)))
PARTS = ((stored(1, 2), stored(9)), (stored(3, parent=2),))
SNAPSHOT = encode_head(HEAD) + b"".join(encode_part(7, part) for part in PARTS) + END


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_snapshot_is_read_in_pieces_of_any_size(size: int) -> None:
    reader = SnapshotReader()
    parts = [part for at in range(0, len(SNAPSHOT), size) for part in reader.feed(SNAPSHOT[at : at + size])]
    assert reader.ended
    assert reader.head == HEAD
    assert tuple(parts) == PARTS


def test_a_snapshot_that_is_cut_does_not_end() -> None:
    for end in range(len(SNAPSHOT)):
        reader = SnapshotReader()
        reader.feed(SNAPSHOT[:end])
        assert not reader.ended


@pytest.mark.parametrize(
    "wrong",
    [
        b"HTTP/1.1" + bytes(48),
        encode_head(Head(-1, 0.0, bytes(32))),
        SNAPSHOT + b"more bytes",
        encode_head(HEAD) + b"\xff\xff\xff\xff",
        encode_head(HEAD) + b"\1\0\0\0\xc1",
    ],
)
def test_what_is_no_snapshot_is_refused(wrong: bytes) -> None:
    with pytest.raises(KvEventsError):
        SnapshotReader().feed(wrong)


def test_changed_bytes_of_a_snapshot_are_refused_at_most() -> None:
    for at in range(0, len(SNAPSHOT), 3):
        changed = bytearray(SNAPSHOT)
        changed[at] ^= 0x55
        with suppress(KvEventsError):
            SnapshotReader().feed(bytes(changed))
