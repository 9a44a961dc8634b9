"""The events of a cache in this process, as EchoEngine tells them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count

from engines.contract import Delta, GenerateRequest, IdsPrompt, KvSource, Sampling
from engines.echo import EchoEngine
from engines.echo_tokens import encode, pack
from engines.kv_events import EventBatch, FeedItem, FeedReset, FeedSnapshot
from engines.kv_stream import MAX_BEHIND, KvStream, ResidentBlocks
from tests.engines.kv_publisher import stored


def now() -> float:
    return 1000.0


async def say(engine: EchoEngine, text: str, *, session: str | None = None, salt: str = "") -> Delta:
    ids = pack(encode(text))

    async def whole() -> bytes:
        return ids

    prompt = IdsPrompt(ids, len(ids) // 4, whole, session)
    request = GenerateRequest("r", "echo", prompt, Sampling(max_tokens=8), cache_salt=salt)
    async with aclosing(engine.generate(request)) as deltas:
        return [delta async for delta in deltas][-1]


class Index:
    """What a feed adds up to."""

    def __init__(self) -> None:
        self.blocks = ResidentBlocks()
        self.resets: list[FeedReset] = []
        self.seq = -1

    def take(self, item: FeedItem) -> None:
        if isinstance(item, FeedReset):
            self.resets.append(item)
            self.blocks = ResidentBlocks()
            return
        for event in item.stored if isinstance(item, FeedSnapshot) else item.events:
            self.blocks.apply(event)
        if isinstance(item, EventBatch) or item.last:
            self.seq = item.seq

    async def follow(self, feed: AsyncGenerator[FeedItem, None], seq: int) -> None:
        async with asyncio.timeout(20):
            while self.seq < seq:
                self.take(await anext(feed))


def held(engine: EchoEngine) -> set[bytes]:
    return set(engine.paths._holders)


def test_an_engine_without_a_stream_tells_nothing() -> None:
    engine = EchoEngine()
    assert isinstance(engine, KvSource)
    assert engine.kv_feed() is None
    assert not asyncio.run(engine.capabilities()).kv_events


def test_what_echo_tells_is_what_it_holds_for_an_early_and_for_a_late_reader() -> None:
    async def test() -> None:
        stream = KvStream(now)
        engine = EchoEngine(block_size=16, num_blocks=12, kv=stream)
        assert (await engine.capabilities()).kv_events
        early, late = Index(), Index()
        feed = engine.kv_feed()
        assert feed is not None
        async with aclosing(feed) as first:
            early.take(await anext(first))
            assert early.resets == [FeedReset(0, "start", whole=True)]
            for number in range(20):  # twelve blocks hold few of these
                await say(engine, f"{number % 7} " * 30, session=f"s{number % 5}", salt="t" * (number % 2))
                if number == 12:
                    await engine.forget("s1", "t")
            await early.follow(first, stream.last.seq)
            roots = [block for block in early.blocks.tier("GPU").values() if block.parent is None]
            assert {block.salt for block in roots} == {"", "t"}
            other = engine.kv_feed()
            assert other is not None
            async with aclosing(other) as second:
                await late.follow(second, stream.last.seq)
                await say(engine, "one more " * 20)
                await late.follow(second, stream.last.seq)
            await early.follow(first, stream.last.seq)
        engine.paths.check()
        for index in (early, late):
            assert set(index.blocks.tier("GPU")) == held(engine)

    asyncio.run(test())


def test_a_reader_that_falls_far_behind_is_told_all_anew() -> None:
    async def test() -> None:
        stream = KvStream(now)
        async with aclosing(stream.feed()) as feed:
            index = Index()
            await index.follow(feed, 0)
            for number in range(MAX_BEHIND + 5):
                stream.publish((stored(number),))
            await index.follow(feed, stream.last.seq)
            assert [reset.whole for reset in index.resets] == [True, True]
            assert len(index.blocks) == MAX_BEHIND + 5
            stream.publish((stored(9999),))
            item = await anext(feed)
            assert isinstance(item, EventBatch)
            assert item.seq == stream.last.seq

    asyncio.run(test())


def test_a_feed_that_is_closed_is_told_nothing_more() -> None:
    async def test() -> None:
        stream = KvStream(now)
        async with aclosing(stream.feed()) as feed:
            await anext(feed)
            assert len(stream._listeners) == 1
        assert stream._listeners == []

    asyncio.run(test())


def test_batches_are_numbered_from_the_one_that_says_nothing_is_there() -> None:
    numbers = count(1)
    stream = KvStream(lambda: float(next(numbers)))
    assert (stream.last.seq, stream.last.at) == (0, 1.0)
    stream.publish(())
    assert stream.last.seq == 0
    stream.publish((stored(1),))
    assert (stream.last.seq, stream.last.at) == (1, 2.0)
