"""What our own engine's cache holds: asked where it publishes, a snapshot to begin with, then its events."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from engines.contract import EngineBroken, EngineError
from engines.kv_events import BlockStored, FeedItem, FeedSnapshot, KvEventsError
from engines.kv_snapshot import CONTENT_TYPE, Head, SnapshotReader
from engines.remote.http import Reply, Upstream
from engines.remote.kv_feed import FeedAddress, feed
from engines.remote.replies import check, json_of

LOST_S = 2.0  # without a connection: the engine may publish elsewhere by now
AGAIN_S = (0.5, 4.0)  # between two questions where it publishes: each waits for twice as long
SNAPSHOT = "/turnkeep/v1/kv/snapshot"


async def turnkeep_feed(upstream: Upstream) -> AsyncGenerator[FeedItem, None]:
    """As KvSource.kv_feed. Silent while the engine is away, or says of no place that is its own."""

    def snapshot() -> AsyncGenerator[Head | FeedSnapshot, None]:
        return read_snapshot(upstream)

    wait_s = AGAIN_S[0]
    while True:
        try:
            found = json_of(await upstream.get("/turnkeep/v1/capabilities"), upstream.name)
            address = told_address(found, upstream.url)
        except EngineError:
            address = None
        wait_s = AGAIN_S[0] if address is not None else min(2 * wait_s, AGAIN_S[1])
        if address is not None:
            async with aclosing(feed(address, snapshot=snapshot, lost_s=LOST_S)) as items:
                async for item in items:
                    yield item
        await asyncio.sleep(wait_s)


def told_address(capabilities: Mapping[str, Any], url: str) -> FeedAddress | None:
    """Where an engine at `url` says that it publishes, if that is on its own host; None otherwise.

    A replica names no other machine to connect to: a wildcard is its URL's host, a loopback address and a socket file
    hold where the URL is loopback, too.
    """
    told = capabilities.get("kv")
    if not capabilities.get("kv_events") or not isinstance(told, dict):
        return None
    host = urlsplit(url).hostname or ""
    events, replay = (_own(told.get(what), host) for what in ("events", "replay"))
    try:
        return FeedAddress(events, replay) if events is not None and replay is not None else None
    except ValueError:
        return None


def _own(endpoint: Any, host: str) -> str | None:
    if not isinstance(endpoint, str):
        return None
    if endpoint.startswith("ipc://"):
        return endpoint if _loopback(host) else None
    try:
        parts = urlsplit(endpoint)
        named, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    if parts.scheme != "tcp" or not port:
        return None
    if named not in ("0.0.0.0", "::", "*") and named != host.lower() and not (_loopback(named) and _loopback(host)):
        return None
    there = host if named in ("0.0.0.0", "::", "*") else named
    return f"tcp://[{there}]:{port}" if ":" in there else f"tcp://{there}:{port}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def read_snapshot(upstream: Upstream) -> AsyncGenerator[Head | FeedSnapshot, None]:
    """The head, then the parts, the last of them marked. Raises EngineError: a snapshot that is cut is none."""
    stream = await upstream.open_get(SNAPSHOT, accept=CONTENT_TYPE)
    try:
        if stream.status != 200:
            check(Reply(stream.status, stream.content_type, await stream.read_all()), upstream.name)
        reader, told = SnapshotReader(), False
        ahead: tuple[BlockStored, ...] | None = None
        while not reader.ended:
            if not (received := await stream.read()):
                raise EngineBroken(f"{upstream.name} cut its snapshot short", replica=upstream.name)
            stream.begun()
            parts = reader.feed(received)
            if reader.head is not None and not told:
                told = True
                yield reader.head
            for part in parts:
                if ahead is not None:
                    assert reader.head is not None
                    yield FeedSnapshot(0, reader.head.seq, ahead, last=False)
                ahead = part
        assert reader.head is not None
        yield FeedSnapshot(0, reader.head.seq, ahead or (), last=True)
        await stream.finish()
    except KvEventsError as error:
        raise EngineBroken(f"{upstream.name}: {error}", replica=upstream.name) from error
    finally:
        stream.close()
