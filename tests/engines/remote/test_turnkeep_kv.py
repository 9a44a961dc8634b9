"""Where our own engine's events are taken from, and what of its snapshot is believed."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engines.contract import EngineBroken, EngineError, EngineUnreachable, KvSource
from engines.kv_events import FeedReset, FeedSnapshot
from engines.kv_snapshot import END, Head, encode_head, encode_part
from engines.remote.connect import connect
from engines.remote.http import Upstream
from engines.remote.kv_feed import FeedAddress
from engines.remote.turnkeep_kv import read_snapshot, told_address
from tests.contracts.live import LiveServer
from tests.engines.kv_publisher import publisher, stored

HEAD = Head(7, 1.5, bytes(32))
BEGINNING = encode_head(HEAD) + encode_part(7, (stored(1, 2),))


def told(events: Any, replay: Any = "tcp://127.0.0.1:5558", **more: Any) -> dict[str, Any]:
    return {"kv_events": True, "kv": {"events": events, "replay": replay}} | more


@pytest.mark.parametrize(
    ("url", "events", "expected"),
    [
        ("http://127.0.0.1:8100", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("http://localhost:8100", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("http://[::1]:8100/prefix", "tcp://[::1]:5557", "tcp://[::1]:5557"),
        ("http://127.0.0.1:8100", "tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"),
        ("http://127.0.0.1:8100", "ipc:///run/kv", "ipc:///run/kv"),
        ("http://127.0.0.1:8100", "tcp://10.0.0.7:5557", None),
        ("http://127.0.0.1:8100", "tcp://metadata.internal:80", None),
        ("http://127.0.0.1:8100", "http://127.0.0.1:5557", None),
        ("http://127.0.0.1:8100", "tcp://127.0.0.1:x", None),
        ("http://127.0.0.1:8100", "tcp://127.0.0.1", None),
        ("http://127.0.0.1:8100", 5557, None),
        ("http://10.0.0.7:8100", "tcp://127.0.0.1:5557", None),
        ("http://10.0.0.7:8100", "ipc:///run/kv", None),
    ],
)
def test_a_replica_names_no_place_but_its_own_host(url: str, events: Any, expected: str | None) -> None:
    address = told_address(told(events), url)
    assert (None if address is None else address.events) == expected


@pytest.mark.parametrize("url", ["http://10.0.0.7:8100", "http://engine-3:8100"])
def test_a_wildcard_is_the_host_that_it_was_asked_at(url: str) -> None:
    host = url.removeprefix("http://").removesuffix(":8100")
    address = told_address(told("tcp://0.0.0.0:5557", f"tcp://{host}:5558"), url)
    assert address == FeedAddress(f"tcp://{host}:5557", f"tcp://{host}:5558")


@pytest.mark.parametrize(
    "capabilities",
    [
        {},
        {"kv_events": True},
        told("tcp://127.0.0.1:5557", None),
        told("tcp://127.0.0.1:5557", kv_events=False),
        told("tcp://127.0.0.1:5557", kv="everywhere"),
    ],
)
def test_an_engine_that_says_less_has_no_address(capabilities: dict[str, Any]) -> None:
    assert told_address(capabilities, "http://127.0.0.1:8100") is None


def snapshot_of(answer: Response) -> list[Head | FeedSnapshot]:
    async def test() -> list[Head | FeedSnapshot]:
        async def give(_: Any) -> Response:
            return answer

        app = Starlette(routes=[Route("/turnkeep/v1/kv/snapshot", give)])
        with LiveServer(app) as server:
            upstream = Upstream(server.url)
            try:
                async with aclosing(read_snapshot(upstream)) as parts:
                    return [part async for part in parts]
            finally:
                await upstream.aclose()

    return asyncio.run(test())


def test_a_snapshot_is_a_head_and_parts_of_which_the_last_says_so() -> None:
    whole = BEGINNING + encode_part(7, (stored(9),)) + END
    assert snapshot_of(Response(whole)) == [
        HEAD,
        FeedSnapshot(0, 7, (stored(1, 2),), last=False),
        FeedSnapshot(0, 7, (stored(9),), last=True),
    ]


def test_a_snapshot_of_nothing_has_one_empty_part() -> None:
    assert snapshot_of(Response(encode_head(HEAD) + END)) == [HEAD, FeedSnapshot(0, 7, (), last=True)]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Response(BEGINNING), EngineBroken),
        (Response(b"<html>" + bytes(100)), EngineBroken),
        (Response(BEGINNING + b"\1\0\0\0\xc1"), EngineBroken),
        (Response(b'{"error": {}}', status_code=404), EngineError),
        (Response(b"", status_code=502), EngineUnreachable),
    ],
)
def test_a_snapshot_that_is_cut_or_none_is_an_error(answer: Response, error: type[EngineError]) -> None:
    with pytest.raises(error):
        snapshot_of(answer)


def test_a_snapshot_may_come_in_many_pieces() -> None:
    async def pieces() -> Any:
        for at in range(0, len(BEGINNING), 11):
            yield BEGINNING[at : at + 11]
        yield END

    assert snapshot_of(StreamingResponse(pieces())) == [HEAD, FeedSnapshot(0, 7, (stored(1, 2),), last=True)]


@pytest.mark.parametrize("kind", ["turnkeep", "vllm", "sglang"])
def test_what_the_operator_says_reaches_the_engine(kind: Any) -> None:
    async def test() -> None:
        async with publisher() as source:
            batch = source.publish(stored(1))
            engine = await connect("http://127.0.0.1:9", kind=kind, kv=FeedAddress(source.events, source.replay))
            assert isinstance(engine, KvSource)
            items = engine.kv_feed()
            assert items is not None
            async with aclosing(items), asyncio.timeout(20):
                reset = await anext(items)
                assert isinstance(reset, FeedReset)
                if kind != "turnkeep":  # it would begin with a snapshot, from port 9
                    assert reset.whole
                    assert await anext(items) == batch
            await engine.aclose()

    asyncio.run(test())


def test_an_engine_that_nobody_says_anything_of_tells_nothing() -> None:
    async def test() -> None:
        for kind in ("vllm", "sglang"):
            engine = await connect("http://127.0.0.1:9", kind=kind)
            assert isinstance(engine, KvSource)
            assert engine.kv_feed() is None
            await engine.aclose()

    asyncio.run(test())
