"""KV events of a whole engine process: published, replayed, told to one who comes late, and true."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio

from engines.contract import GenerateRequest, IdsPrompt, KvSource, Sampling, Usage
from engines.kv_events import AllBlocksCleared, BlockStored, EventBatch, FeedItem, FeedReset, FeedSnapshot, decode_batch
from engines.kv_snapshot import CONTENT_TYPE, SnapshotReader
from engines.kv_stream import ResidentBlocks
from engines.local.checks import u32_bytes
from engines.remote.connect import connect
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.turnkeep_kv import told_address
from tests.engines.local.resident import resident
from tests.engines.running import RunningEngine, running_engine, start

BLOCK, PAGES = 16, 12
KV = {"kv_events": "tcp://127.0.0.1:0", "block_size": BLOCK}
WAIT_S = 60.0


class Index:
    """What a feed adds up to, kept up to date by `follow`."""

    def __init__(self, feed: AsyncGenerator[FeedItem, None]) -> None:
        self.blocks = ResidentBlocks()
        self.resets: list[FeedReset] = []
        self.seq = -1
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._read(feed))

    async def _read(self, feed: AsyncGenerator[FeedItem, None]) -> None:
        async with aclosing(feed):
            async for item in feed:
                if isinstance(item, FeedReset):
                    self.resets.append(item)
                    self.blocks, self.seq = ResidentBlocks(), -1
                else:
                    for event in item.stored if isinstance(item, FeedSnapshot) else item.events:
                        self.blocks.apply(event)
                    if isinstance(item, EventBatch) or item.last:
                        self.seq = item.seq
                self._changed.set()

    async def until(self, seq: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.seq < seq:
                self._changed.clear()
                await self._changed.wait()

    async def until_reset(self, number: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.resets) < number or self.seq < 0:
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def cached(self, ids: list[int], salt: str = "") -> int:
        """Tokens of the longest prefix of `ids` that it knows, the last token left out."""
        parent: bytes | None = None
        found = 0
        children = {
            (block.parent, block.token_bytes, block.salt): block.name for block in self.blocks.tier("GPU").values()
        }
        for end in range(BLOCK, len(ids), BLOCK):
            key = (parent, u32_bytes(ids[end - BLOCK : end]), salt if parent is None else "")
            if (name := children.get(key)) is None:
                break
            parent, found = name, end
        return found


@asynccontextmanager
async def indexes(url: str) -> AsyncIterator[Any]:
    """Makes any number of indexes over one connected engine, and closes them."""
    engine = await connect(url)
    assert isinstance(engine, KvSource)
    assert (await engine.capabilities()).kv_events
    made: list[Index] = []

    def index() -> Index:
        assert isinstance(engine, KvSource)
        feed = engine.kv_feed()
        assert feed is not None
        made.append(Index(feed))
        return made[-1]

    try:
        yield engine, index
    finally:
        for one in made:
            await one.close()
        await engine.aclose()


async def say(
    engine: TurnkeepEngine,
    ids: list[int],
    *,
    model: str,
    session: str | None = None,
    salt: str = "",
    max_tokens: int = 3,
) -> Usage:
    async def whole() -> bytes:
        return u32_bytes(ids)

    prompt = IdsPrompt(u32_bytes(ids), len(ids), whole, session)
    asked = GenerateRequest("r", model, prompt, Sampling(max_tokens=max_tokens, temperature=0.0), cache_salt=salt)
    async with aclosing(engine.generate(asked)) as deltas:
        async for delta in deltas:
            if delta.usage is not None:
                return delta.usage
    raise AssertionError("no usage")


def newest(url: str) -> int:
    """The number of the batch that the engine's state stands for now."""
    answer = httpx.get(f"{url}/turnkeep/v1/kv/snapshot")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == CONTENT_TYPE
    reader = SnapshotReader()
    reader.feed(answer.content)
    assert reader.ended
    assert reader.head is not None
    return reader.head.seq


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


@pytest.fixture(scope="module")
def echo() -> Any:
    with running_engine(KV | {"model": "echo"}) as running:
        yield running


def test_capabilities_and_the_ready_line_say_where_the_events_are(echo: RunningEngine) -> None:
    told = echo.client.get("/turnkeep/v1/capabilities").json()
    assert told["kv_events"] is True
    assert told["kv"] == {"events": echo.ready["kv_events"], "replay": echo.ready["kv_replay"]}
    address = told_address(told, echo.url)
    assert address is not None
    assert (address.events, address.replay) == (told["kv"]["events"], told["kv"]["replay"])


def test_an_early_and_a_late_subscriber_know_the_same(echo: RunningEngine) -> None:
    async def test() -> None:
        async with indexes(echo.url) as (engine, index):
            early = index()
            await early.until(0)
            rng = random.Random(5)
            for number in range(12):
                ids = [rng.randrange(256) for _ in range(rng.randrange(20, 90))]
                await say(engine, ids, model="echo", session=f"s{number % 4}", salt="t" * (number % 2))
            await engine.forget("s1", "t")
            late = index()
            for one in (early, late):
                await one.until(newest(echo.url))
            assert early.blocks.tier("GPU") == late.blocks.tier("GPU")
            assert len(early.blocks) == echo.client.get("/health").json()["pool"]["cached"]
            assert early.resets == late.resets == [FeedReset(0, "start", whole=True)]

    run(test())


def test_any_subscriber_of_vllm_s_format_can_read_it() -> None:
    """Frames and replay as vLLM's own example subscriber uses them, without a line of our feed. The engine is its own:
    one that was told to forget a session replays nothing from before."""
    with running_engine(KV | {"model": "echo"}) as echo:
        _read_as_vllm_s_example_reads(echo)


def _read_as_vllm_s_example_reads(echo: RunningEngine) -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        sub, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        try:
            sub.connect(echo.ready["kv_events"])
            sub.subscribe(b"")
            dealer.connect(echo.ready["kv_replay"])
            await dealer.send_multipart((b"", (0).to_bytes(8, "big")))
            replayed = []
            async with asyncio.timeout(WAIT_S):
                while (frames := await dealer.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
                    replayed.append(decode_batch(int.from_bytes(frames[1], "big"), frames[2]))
            assert [batch.seq for batch in replayed] == list(range(len(replayed)))
            assert replayed[0].events == (AllBlocksCleared(),)
            engine = TurnkeepEngine((await connect(echo.url))._upstream)  # type: ignore[attr-defined]
            await say(engine, list(range(40)), model="echo", salt="tenant")
            await engine.aclose()
            async with asyncio.timeout(WAIT_S):
                topic, seq, payload = await sub.recv_multipart()
            batch = decode_batch(int.from_bytes(seq, "big"), payload)
            assert topic == b""
            assert batch.seq == len(replayed)
            [event] = batch.events
            assert isinstance(event, BlockStored)
            assert (event.block_size, event.salt, event.parent) == (BLOCK, "tenant", None)
            assert event.token_ids == u32_bytes(list(range(32)))
        finally:
            context.destroy(linger=0)

    run(test())


def test_a_replay_request_that_is_none_is_passed_over(echo: RunningEngine) -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.connect(echo.ready["kv_replay"])
            for wrong in ((b"alone",), (b"", b"short"), (b"", b"8 bytes.", b"more")):
                await dealer.send_multipart(wrong)
            await dealer.send_multipart((b"", (1 << 40).to_bytes(8, "big")))
            async with asyncio.timeout(WAIT_S):
                assert await dealer.recv_multipart() == [b"", b"\xff" * 8, b""]
        finally:
            context.destroy(linger=0)

    run(test())


def test_an_engine_that_is_killed_and_started_again_elsewhere_is_told_anew() -> None:
    async def test() -> None:
        options = KV | {"model": "echo"}
        with running_engine(options) as first:
            port = int(first.url.rsplit(":", 1)[1])
            async with indexes(first.url) as (engine, index):
                one = index()
                await say(engine, list(range(64)), model="echo")
                await one.until(1)
                assert len(one.blocks) == 4
                first.process.send_signal(signal.SIGKILL)
                first.process.wait()
                with running_engine(options | {"port": port}) as second:
                    assert second.ready["kv_events"] != first.ready["kv_events"]
                    await one.until_reset(2)
                    assert one.resets[-1].whole
                    assert len(one.blocks) == 0
                    await say(engine, list(range(32)), model="echo")
                    await one.until(1)
                    assert len(one.blocks) == 2

    run(test())


def test_an_engine_that_was_not_told_to_publish_has_no_events() -> None:
    with running_engine({"model": "echo"}) as running:
        told = running.client.get("/turnkeep/v1/capabilities").json()
        assert told["kv_events"] is False
        assert "kv" not in told
        assert "kv_events" not in running.ready
        assert running.client.get("/turnkeep/v1/kv/snapshot").status_code == 404

        async def test() -> None:
            engine = await connect(running.url)
            assert isinstance(engine, TurnkeepEngine)
            assert not (await engine.capabilities()).kv_events
            assert engine.kv_feed() is None
            await engine.aclose()

        run(test())


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "http://127.0.0.1:1", "tcp://203.0.113.7:0", "ipc://"])
def test_where_it_cannot_publish_it_does_not_start(endpoint: str) -> None:
    import subprocess

    with start({"model": "echo", "kv_events": endpoint}, None, stderr=subprocess.PIPE) as process:
        said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 1
    assert "the engine cannot start: KV events" in said


@pytest.mark.model
@pytest.mark.prove
def test_what_the_real_engine_tells_is_what_it_reuses(model_dir: Path) -> None:
    """Sessions in a pool that holds a part of them: after each answer the prediction from events is the next reuse."""

    async def test() -> None:
        pool = {"pool_bytes": PAGES * BLOCK * 46_080, "threads": 1, "served_name": "small", "model": str(model_dir)}
        with running_engine(KV | pool) as running:
            async with indexes(running.url) as (engine, index):
                early = index()
                rng = random.Random(3)
                shared = [rng.randrange(1000, 40_000) for _ in range(32)]
                talks = [shared + [rng.randrange(1000, 40_000) for _ in range(14)] for _ in range(5)]
                hits = misses = 0
                for _ in range(12):
                    which = rng.randrange(len(talks))
                    salt = "t" if which == 4 else ""
                    talks[which] += [rng.randrange(1000, 40_000) for _ in range(rng.randrange(1, 8))]
                    del talks[which][64:]
                    await early.until(newest(running.url))
                    expected = early.cached(talks[which], salt)
                    usage = await say(engine, talks[which], model="small", salt=salt)
                    assert usage.cached_tokens == expected
                    hits += expected > 32
                    misses += expected <= 32
                    resident(early.blocks, str(model_dir))
                assert hits > 2
                assert misses > 2
                late = index()
                for one in (early, late):
                    await one.until(newest(running.url))
                assert early.blocks.tier("GPU") == late.blocks.tier("GPU")
                assert 0 < len(early.blocks) <= PAGES
                pages = running.client.get("/health").json()["pool"]
                assert pages["cached"] == len(early.blocks)

    run(test())
