"""A replica's KV events over real sockets: what is lost is replayed, or told."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engines.kv_events import AllBlocksCleared, EventBatch, FeedItem, FeedReset, FeedSnapshot
from engines.remote.kv_feed import FeedAddress, feed
from engines.remote.kv_sequence import Mark, Step, step
from tests.engines.kv_publisher import Publisher, name, publisher, removed, stored

WAIT_S = 20.0


class Reader:
    """Reads a feed, and keeps what it makes of it: the names that are stored, by rank."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self.told: list[FeedItem] = []
        self.held: dict[int, set[bytes]] = {}
        self._coming: asyncio.Future[FeedItem] | None = None

    async def soon(self, timeout_s: float) -> bool:
        """Whether an item comes in time; it stays the next one. (A feed whose anext is cancelled has ended.)"""
        self._coming = self._coming or asyncio.ensure_future(anext(self._items))
        return bool((await asyncio.wait({self._coming}, timeout=timeout_s))[0])

    async def next(self) -> FeedItem:
        assert await self.soon(WAIT_S), "nothing came"
        assert self._coming is not None
        item, self._coming = self._coming.result(), None
        self.told.append(item)
        if isinstance(item, FeedReset):
            assert item.rank is not None
            self.held[item.rank] = set()
        elif isinstance(item, EventBatch):
            held = self.held[item.rank]
            for event in item.events:
                if isinstance(event, AllBlocksCleared):
                    held.clear()
                elif type(event).__name__ == "BlockStored":
                    held.update(event.hashes)
                else:
                    held.difference_update(event.hashes)
        else:
            self.held[item.rank].update(one for event in item.stored for one in event.hashes)
        return item

    async def until(self, *numbers: int, rank: int = 0) -> None:
        """Read until just these are held."""
        while self.held.get(rank) != {name(number) for number in numbers}:
            await self.next()

    @property
    def resets(self) -> list[FeedReset]:
        return [item for item in self.told if isinstance(item, FeedReset)]


@asynccontextmanager
async def reading(address: FeedAddress, **options: Any) -> AsyncIterator[Reader]:
    async with aclosing(feed(address, **({"replay_timeout_s": 0.4, "quiet_s": (0.1, 0.4)} | options))) as items:
        reader = Reader(items)
        yield reader
        if reader._coming is not None:
            reader._coming.cancel()
            await asyncio.wait({reader._coming})


def of(source: Publisher, *, replay: bool = True) -> FeedAddress:
    return FeedAddress(source.events, source.replay if replay else None)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await test

    asyncio.run(bounded())


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_late_subscriber_is_told_all_that_is_kept_and_then_what_happens(form: Any) -> None:
    async def test() -> None:
        async with publisher(form=form) as source:
            first = [source.publish(stored(1, 2)), source.publish(stored(3, parent=2), removed(1))]
            async with reading(of(source)) as reader:
                await reader.until(2, 3)
                assert reader.told == [FeedReset(0, "start", whole=True), *first]
                now = source.publish(stored(4, parent=3))
                await reader.until(2, 3, 4)
                assert reader.told[-1] == now
                assert len(reader.resets) == 1

    run(test())


def test_one_who_comes_before_the_first_batch_knows_the_whole() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source)) as reader:
            assert await reader.next() == FeedReset(0, "start", whole=True)
            await asyncio.sleep(0.3)  # a few checks, which find nothing
            batch = source.publish(stored(1))
            assert await reader.next() == batch

    run(test())


def test_one_who_comes_too_late_for_the_first_batches_is_told_that_it_is_not_the_whole() -> None:
    async def test() -> None:
        async with publisher(keep=2) as source:
            for number in range(5):
                source.publish(stored(number))
            async with reading(of(source)) as reader:
                await reader.until(3, 4)
                assert reader.resets == [FeedReset(0, "start", whole=False)]

    run(test())


def test_a_gap_is_filled_by_a_replay_in_order() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source), quiet_s=(60, 60)) as reader:
            source.publish(stored(1))
            await reader.until(1)
            source.publish(stored(2), lost=True)
            source.publish(removed(1), lost=True)
            source.publish(stored(3))
            await reader.until(2, 3)
            batches = [item.seq for item in reader.told if isinstance(item, EventBatch)]
            assert batches == [0, 1, 2, 3]
            assert len(reader.resets) == 1

    run(test())


def test_the_last_batch_of_all_is_found_though_nothing_follows_it() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source)) as reader:
            source.publish(stored(1))
            await reader.until(1)
            source.publish(stored(2), lost=True)
            await reader.until(1, 2)
            assert len(reader.resets) == 1

    run(test())


def test_a_gap_that_the_replay_keeps_no_more_resets_the_rank() -> None:
    async def test() -> None:
        async with publisher(keep=3) as source, reading(of(source), quiet_s=(60, 60)) as reader:
            source.publish(stored(1))
            await reader.until(1)
            for number in range(2, 9):
                source.publish(stored(number), lost=True)
            source.publish(stored(9))
            await reader.until(7, 8, 9)
            assert len(reader.resets) == 2
            assert not reader.resets[1].whole
            assert "keeps too few" in reader.resets[1].reason

    run(test())


def test_without_a_replay_a_gap_resets_the_rank_and_the_feed_goes_on() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source, replay=False)) as reader:
            assert await reader.next() == FeedReset(0, "start: no replay is configured")
            await _subscribed(source, reader)
            source.publish(stored(2), lost=True)
            source.publish(stored(3))
            await reader.until(3)
            assert reader.resets[-1].reason == f"batches {source.seq - 2} to {source.seq - 2} are missing: " + (
                "no replay is configured"
            )

    run(test())


async def _subscribed(source: Publisher, reader: Reader) -> None:
    """Publish until the subscription has reached the publisher."""
    for _ in range(200):
        source.publish(stored(1))
        if not await reader.soon(0.1):
            continue
        item = await reader.next()
        assert isinstance(item, EventBatch)
        while item.seq < source.seq - 1:
            following = await reader.next()
            assert isinstance(following, EventBatch)
            item = following
        return
    raise AssertionError("no batch came")


def test_a_replay_that_does_not_answer_resets_the_rank_until_it_answers_again() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source)) as reader:
            source.publish(stored(1))
            await reader.until(1)
            source.answers = False
            source.publish(stored(2), lost=True)
            source.publish(stored(3))
            while not (reader.told and "does not answer" in getattr(reader.told[-1], "reason", "")):
                await reader.next()
            await reader.until(3)
            source.answers = True
            await reader.until(1, 2, 3)
            assert reader.resets[-1].whole

    run(test())


def test_an_engine_that_started_anew_is_told_anew() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source)) as reader:
            for number in range(5):
                source.publish(stored(number))
            await reader.until(0, 1, 2, 3, 4)
            await source.stop()
            source.start()
            source.publish(stored(7), at=100.0)
            await reader.until(7)
            assert reader.resets[-1].whole
            assert "started anew" in reader.resets[-1].reason
            source.publish(stored(8), at=101.0)
            await reader.until(7, 8)

    run(test())


def test_an_engine_that_started_anew_and_counted_as_far_is_not_taken_for_the_same() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source)) as reader:
            for number in range(3):
                source.publish(stored(number))
            await reader.until(0, 1, 2)
            await source.stop()
            source.start()
            for number in range(10, 13):
                source.publish(stored(number), at=100.0 + number)  # nobody is there to hear these
            source.publish(stored(13), at=200.0)  # number 3, just what would come next
            await reader.until(10, 11, 12, 13)
            assert reader.resets[-1].whole

    run(test())


def test_an_engine_whose_clock_was_set_back_is_heard_though_it_never_pauses() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source), quiet_s=(0.2, 60)) as reader:
            source.publish(stored(1), at=1e12)
            await reader.until(1)
            for number in range(2, 40):
                source.publish(stored(number), at=1000.0 + number)
                await asyncio.sleep(0.01)
                if await reader.soon(0):
                    break
            await reader.until(*range(1, number + 1))
            assert len(reader.resets) == 1

    run(test())


def test_without_a_replay_a_clock_that_was_set_back_resets_the_rank() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source, replay=False)) as reader:
            await reader.next()
            await _subscribed(source, reader)
            source.publish(stored(2), at=-5.0)
            await reader.until(2)
            assert "is older than batch" in reader.resets[-1].reason

    run(test())


def test_without_a_replay_a_lost_connection_resets_the_rank() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source, replay=False)) as reader:
            await reader.next()
            await _subscribed(source, reader)
            await source.stop()
            item = await reader.next()
            assert item == FeedReset(0, "the connection was lost, and no replay is configured")

    run(test())


def test_a_connection_that_breaks_and_comes_again_loses_nothing() -> None:
    async def test() -> None:
        async with publisher() as source, _relay(source) as relay:
            address = FeedAddress(relay.endpoint, source.replay)
            async with reading(address, quiet_s=(60, 60)) as reader:
                source.publish(stored(1))
                await reader.until(1)
                relay.cut()
                source.publish(stored(2))
                await reader.until(1, 2)
                assert len(reader.resets) == 1

    run(test())


class _Relay:
    """Bytes between a subscriber and a publisher, on connections that can be cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except ConnectionError:
            return
        finally:
            writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def _relay(source: Publisher) -> AsyncIterator[_Relay]:
    relay = _Relay(int(source.events.rsplit(":", 1)[1]))
    server = await asyncio.start_server(relay.met, "127.0.0.1", 0)
    relay.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield relay
    finally:
        relay.cut()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0.05)


def test_each_data_parallel_rank_has_its_own_port_and_its_own_numbers() -> None:
    async def test() -> None:
        ports = _neighbours()
        first, second = Publisher(), Publisher(rank=1)
        for source, at in ((first, 0), (second, 1)):
            await source.stop()
            source._ports = [ports[0] + at, ports[1] + at]
            source.start()
        try:
            address = FeedAddress(first.events, first.replay, ranks=2)
            async with reading(address) as reader:
                first.publish(stored(1))
                second.publish(stored(5))
                second.publish(stored(6))
                await reader.until(1, rank=0)
                await reader.until(5, 6, rank=1)
                await second.stop()
                second.start()
                second.publish(stored(9), at=50.0)
                await reader.until(9, rank=1)
                assert reader.held[0] == {name(1)}
        finally:
            await first.close()
            await second.close()

    run(test())


def _neighbours() -> tuple[int, int]:
    """Two ports that are free, and whose next ones are."""
    context = zmq.Context()
    found = []
    try:
        for port in range(21_000, 60_000, 2):
            sockets = [context.socket(zmq.PUB) for _ in range(2)]
            try:
                for at, socket in enumerate(sockets):
                    socket.bind(f"tcp://127.0.0.1:{port + at}")
            except zmq.ZMQError:
                continue
            finally:
                for socket in sockets:
                    socket.close(0)
            found.append(port)
            if len(found) == 2:
                return found[0], found[1]
    finally:
        context.destroy(linger=0)
    raise AssertionError("no ports")


def test_a_malformed_batch_resets_the_rank_and_the_feed_goes_on() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source)) as reader:
            source.publish(stored(1))
            await reader.until(1)
            source.send(b"\xc1")
            source.publish(stored(2))
            await reader.until(2)
            assert "malformed" in reader.resets[-1].reason

    run(test())


def test_frames_that_are_no_batch_are_passed_over() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source)) as reader:
            source.publish(stored(1))
            await reader.until(1)
            source._pub.send_multipart((b"", b"short", b""))
            source._pub.send(b"alone")
            source.publish(stored(2))
            await reader.until(1, 2)

    run(test())


def test_a_reader_that_stops_holds_no_more_than_the_sockets_and_catches_up() -> None:
    async def test() -> None:
        async with publisher(keep=100) as source, reading(of(source), quiet_s=(60, 60)) as reader:
            source.publish(stored(1))
            await reader.until(1)
            for number in range(5000):  # more than the socket, the queue and the replay hold together
                source.publish(stored(number), lost=number % 4 == 0)
                if number % 500 == 0:
                    await asyncio.sleep(0.01)
            while not any(isinstance(item, EventBatch) and item.seq == source.seq - 1 for item in reader.told[-1:]):
                await reader.next()
            assert len(reader.resets) >= 2
            kept = range(4900, 5000)
            assert reader.held[0] >= {name(number) for number in kept}

    run(test())


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_the_feed_comes_to_hold_what_the_replica_holds(seed: int) -> None:
    """Batches lost, connections cut, restarts, all at random: in the end nothing is missing and nothing too many."""

    async def test() -> None:
        rng = random.Random(seed)
        async with publisher() as source, _relay(source) as relay:
            address = FeedAddress(relay.endpoint, source.replay)
            async with reading(address, replay_timeout_s=5) as reader:
                truth: set[int] = set()
                clock = 0.0
                for _ in range(120):
                    clock += 1
                    lost = rng.random() < 0.2
                    match rng.choices(("store", "remove", "cut", "restart", "pause"), (60, 25, 5, 3, 7))[0]:
                        case "store":
                            number = rng.randrange(1000)
                            truth.add(number)
                            source.publish(stored(number), lost=lost, at=clock)
                        case "remove" if truth:
                            number = rng.choice(sorted(truth))
                            truth.discard(number)
                            source.publish(removed(number), lost=lost, at=clock)
                        case "cut":
                            relay.cut()
                        case "restart":
                            await source.stop()
                            source.start()
                            truth.clear()
                        case _:
                            await asyncio.sleep(rng.random() * 0.1)
                    while await reader.soon(0) and rng.random() < 0.9:
                        await reader.next()
                truth.add(5000)
                source.publish(stored(5000), at=clock + 1)
                await reader.until(*truth)
                while not reader.resets[-1].whole:  # a replay was under way when the engine went: it is tried again
                    await reader.next()
                await reader.until(*truth)

    run(test())


def test_a_feed_ends_when_its_connection_is_lost_for_long() -> None:
    async def test() -> None:
        async with publisher() as source, reading(of(source), lost_s=0.3) as reader:
            source.publish(stored(1))
            await reader.until(1)
            await source.stop()
            with pytest.raises(StopAsyncIteration):
                await reader.next()

    run(test())


def test_a_snapshot_stands_for_the_batches_before_it() -> None:
    from engines.kv_snapshot import Head, mark_of

    async def test() -> None:
        async with publisher(keep=4) as source, reading(of(source), snapshot=None) as _:
            for number in range(9):
                source.publish(stored(number))
            seq, payload = source.kept[-2]  # taken one batch ago

            async def snapshot() -> AsyncIterator[Head | FeedSnapshot]:
                yield Head(seq, float(seq), mark_of(payload))
                yield FeedSnapshot(0, seq, (stored(20, 21),), last=True)

            async with reading(of(source), snapshot=snapshot) as reader:
                await reader.until(20, 21, 8)
                assert reader.resets == [FeedReset(0, "start", whole=True)]
                source.publish(stored(9))
                await reader.until(20, 21, 8, 9)

    run(test())


def mark(seq: int, at_s: float | None = None, what: bytes = b"a") -> Mark:
    return Mark(seq, float(seq) if at_s is None else at_s, what)


@pytest.mark.parametrize(
    ("last", "live", "came", "expected"),
    [
        (mark(3), 3, mark(4), Step.NEXT),
        (mark(3), 3, mark(6), Step.GAP),
        (mark(3), 3, mark(3), Step.ANEW),  # the subscription never tells a batch twice
        (mark(3), 3, mark(0, 9.0), Step.ANEW),
        (mark(9), 3, mark(5), Step.SEEN),  # the replay was faster
        (mark(9), -1, mark(5), Step.SEEN),
        (mark(9), -1, mark(0, 20.0), Step.ANEW),
        (mark(9), -1, mark(9, 9.0, b"b"), Step.ANEW),
        (mark(2, 50.0), -1, mark(7, 7.0), Step.STALE),
    ],
)
def test_what_a_batch_is(last: Mark, live: int, came: Mark, expected: Step) -> None:
    assert step(last, live, came) is expected


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_whatever_is_lost_the_next_is_only_what_follows(lost: list[bool]) -> None:
    last, live = mark(0), 0
    for seq, gone in enumerate(lost, 1):
        if gone:
            continue
        verdict = step(last, live, mark(seq))
        assert verdict is (Step.NEXT if seq == last.seq + 1 else Step.GAP)
        last, live = mark(seq), seq


@pytest.mark.parametrize(
    "wrong",
    [
        {"events": "http://127.0.0.1:80"},
        {"events": "tcp://*:5557"},
        {"events": "tcp://127.0.0.1"},
        {"events": "tcp://127.0.0.1:0"},
        {"events": "tcp://127.0.0.1:70000"},
        {"events": "tcp://me@127.0.0.1:5557"},
        {"events": "tcp://127.0.0.1:5557/x"},
        {"events": "inproc://x"},
        {"events": "ipc://"},
        {"events": "ipc:///run/kv", "ranks": 2},
        {"events": "tcp://127.0.0.1:65535", "ranks": 2},
        {"events": "tcp://127.0.0.1:5557", "ranks": 0},
        {"events": "tcp://127.0.0.1:5557", "replay": "pgm://x"},
    ],
)
def test_an_address_is_tcp_with_a_port_or_ipc(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"KV events come from|data-parallel ranks"):
        FeedAddress(**wrong)


def test_ranks_have_the_ports_that_follow() -> None:
    address = FeedAddress("tcp://[::1]:5557", "tcp://h:5600", ranks=3)
    assert address.of_rank(2) == ("tcp://[::1]:5559", "tcp://h:5602")
    assert struct.calcsize(">Q") == 8
