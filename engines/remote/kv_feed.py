"""A replica's KV events over ZeroMQ as one feed: every data-parallel rank, each by itself (kv_rank)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq

from engines.kv_events import FeedItem
from engines.remote.kv_rank import QUIET_S, REPLAY_TIMEOUT_S, RankFeed, Snapshot

MAX_RANKS = 1024
WAITING_ITEMS = 64  # between the ranks and who reads the feed


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """Where a replica publishes: `tcp://HOST:PORT` or `ipc://PATH`. Rank r of `ranks` has port PORT + r, as in vLLM.

    Raises ValueError for anything else. Comes from the operator, or from our own engine on the same host.
    """

    events: str
    replay: str | None = None
    topic: str = ""
    ranks: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"{self.ranks} data-parallel ranks: 1 to {MAX_RANKS}")
        for endpoint in (self.events, self.replay):
            if endpoint is not None:
                self._check(endpoint)

    def of_rank(self, rank: int) -> tuple[str, str | None]:
        """(events, replay) of one rank."""
        return _offset(self.events, rank), _offset(self.replay, rank) if self.replay is not None else None

    def _check(self, endpoint: str) -> None:
        kind, _, rest = endpoint.partition("://")
        if kind == "ipc" and rest and self.ranks == 1:
            return
        try:
            parts = urlsplit(endpoint)
            valid = kind == "tcp" and bool(parts.hostname) and parts.hostname != "*" and bool(parts.port)
            valid = valid and rest == parts.netloc and "@" not in rest and (parts.port or 0) + self.ranks <= 1 << 16
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"KV events come from tcp://HOST:PORT, or ipc://PATH of one rank, not from {endpoint!r}")


def _offset(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"


async def feed(
    address: FeedAddress,
    *,
    snapshot: Snapshot | None = None,
    lost_s: float | None = None,
    quiet_s: tuple[float, float] = QUIET_S,
    replay_timeout_s: float = REPLAY_TIMEOUT_S,
) -> AsyncGenerator[FeedItem, None]:
    """Items of every rank as they come, each rank in its own order. See KvSource.kv_feed.

    `snapshot` is of a replica of one rank. Ends only when a rank had no connection for `lost_s`. A reader that stops
    holds up all ranks; their sockets then fill, and what is lost is replayed or told.
    """
    context = zmq.Context()
    items: asyncio.Queue[FeedItem | None] = asyncio.Queue(WAITING_ITEMS)
    ranks = [
        RankFeed(
            context,
            items.put,
            rank,
            *address.of_rank(rank),
            topic=address.topic,
            snapshot=snapshot,
            lost_s=lost_s,
            quiet_s=quiet_s,
            replay_timeout_s=replay_timeout_s,
        )
        for rank in range(address.ranks)
    ]
    tasks = [asyncio.create_task(_pump(rank, items), name="kv-feed") for rank in ranks]
    try:
        while (item := await items.get()) is not None:
            yield item
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)


async def _pump(rank: RankFeed, items: asyncio.Queue[FeedItem | None]) -> None:
    try:
        await rank.run()
    except asyncio.CancelledError:
        raise  # nobody reads any more
    except BaseException:
        await items.put(None)
        raise
    await items.put(None)
