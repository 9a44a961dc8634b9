"""The KV events of one cache in this process: numbered, mirrored, told to whoever listens.

    pool --events--> KvStream.publish --batch--> listeners (the ZeroMQ publisher)
                        |                   `--> feeds in this process
                     ResidentBlocks: what the batches so far add up to, for those who come late

The mirror lives beside whoever publishes, so a late subscriber costs the pool nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

from engines.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    FeedItem,
    FeedReset,
    FeedSnapshot,
    KvEvent,
)
from engines.kv_log import GPU, Block, runs

MAX_PART = 512  # blocks of one part of a snapshot
MAX_BEHIND = 1000  # batches that a feed in this process may lag behind, before it begins anew


class ResidentBlocks:
    """Which blocks there are in which tier, from events that all tell their ids. Blocks are of one size."""

    def __init__(self) -> None:
        self.block_size = 0
        self._tiers: dict[str, dict[bytes, Block]] = {GPU: {}}

    def __len__(self) -> int:
        """Of the first tier."""
        return len(self._tiers[GPU])

    def __contains__(self, name: bytes) -> bool:
        return name in self._tiers[GPU]

    def tier(self, medium: str) -> Mapping[bytes, Block]:
        return self._tiers.get(medium, {})

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, BlockStored):
            self.block_size = event.block_size
            blocks = self._tiers.setdefault(event.medium or GPU, {})
            parent, salt = event.parent, event.salt
            for name, token_bytes in event.blocks():
                blocks[name] = Block(name, parent, token_bytes, salt)
                parent, salt = name, ""
        elif isinstance(event, BlockRemoved):
            blocks = self._tiers.get(event.medium or GPU, {})
            for name in event.hashes:
                blocks.pop(name, None)
        else:
            self._tiers = {GPU: {}}

    def copy(self) -> ResidentBlocks:
        """As it is now; cheap beside what is done with it."""
        copied = ResidentBlocks()
        copied.block_size = self.block_size
        copied._tiers = {medium: blocks.copy() for medium, blocks in self._tiers.items()}
        return copied

    def stored(self) -> Iterator[BlockStored]:
        """Events that make an empty index the same: tier by tier, in each parents first; a block whose parent has gone
        names it still."""
        for medium, blocks in self._tiers.items():
            yield from runs(_parents_first(blocks), self.block_size, most=MAX_PART, medium=medium)

    def parts(self) -> Iterator[tuple[BlockStored, ...]]:
        """`stored` in parts of about MAX_PART blocks, never of more than twice that; at least one part."""
        part: list[BlockStored] = []
        size, told = 0, False
        for event in self.stored():
            part.append(event)
            size += len(event.hashes)
            if size >= MAX_PART:
                yield tuple(part)
                part, size, told = [], 0, True
        if part or not told:
            yield tuple(part)


def _parents_first(blocks: Mapping[bytes, Block]) -> Iterator[Block]:
    followers: dict[bytes | None, list[Block]] = {}
    for block in blocks.values():
        followers.setdefault(block.parent if block.parent in blocks else None, []).append(block)
    ahead = followers.get(None, [])[::-1]
    while ahead:
        block = ahead.pop()
        yield block
        ahead += followers.get(block.name, ())


class KvStream:
    """`now` in seconds since 1970. The first batch says that nothing is there: a new process holds nothing."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._listeners: list[Callable[[EventBatch], None]] = []
        self.resident = ResidentBlocks()
        self.last = EventBatch(0, now(), 0, (AllBlocksCleared(),))

    def publish(self, events: tuple[KvEvent, ...]) -> None:
        """One batch, told to every listener before this returns; nothing where there are no events."""
        if not events:
            return
        self.last = EventBatch(self.last.seq + 1, self._now(), 0, events)
        for event in events:
            self.resident.apply(event)
        for listener in self._listeners:
            listener(self.last)

    def listen(self, listener: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Tell `listener` every batch from now on, until what comes back is called."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def feed(self) -> AsyncGenerator[FeedItem, None]:
        """As KvSource.kv_feed: what is there, then each batch. One that falls too far behind is told all anew."""
        waiting: deque[EventBatch] = deque()
        wake = asyncio.Event()
        behind = True  # nothing was told yet
        reason = "start"

        def come(batch: EventBatch) -> None:
            nonlocal behind, reason
            if len(waiting) >= MAX_BEHIND:
                waiting.clear()
                behind, reason = True, f"{MAX_BEHIND} batches were not taken"
            if not behind:
                waiting.append(batch)
            wake.set()

        stop = self.listen(come)
        try:
            while True:
                if behind:
                    waiting.clear()
                    behind = False
                    for item in snapshot(self.resident.copy(), self.last.seq, reason):
                        yield item
                while waiting:
                    yield waiting.popleft()
                wake.clear()
                if not behind and not waiting:
                    await wake.wait()
        finally:
            stop()


def snapshot(resident: ResidentBlocks, seq: int, reason: str) -> Iterator[FeedItem]:
    """Reset and snapshot of rank 0, as a feed begins."""
    yield FeedReset(0, reason, whole=True)
    for stored, last in with_last(resident.parts()):
        yield FeedSnapshot(0, seq, stored, last)


def with_last(parts: Iterator[tuple[BlockStored, ...]]) -> Iterator[tuple[tuple[BlockStored, ...], bool]]:
    """Each part, and whether it is the last; an empty last one where there is none."""
    ahead = next(parts, ())
    for part in parts:
        yield ahead, False
        ahead = part
    yield ahead, True
