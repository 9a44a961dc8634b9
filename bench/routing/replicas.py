"""A simulated replica: an exact LRU of blocks, one queue of work, and KV events as bytes, some of them lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

from bench.routing.trace import Asked, BlockLru, ids_of
from engines.kv_events import BlockRemoved, BlockStored, EventBatch, encode_batch
from gateway.fleet.chain import CHUNK_TOKENS


def name_of(block: int) -> bytes:
    """What the simulated engine calls a block: nothing that a gateway could compute."""
    return (block * 2654435761 % (1 << 64)).to_bytes(8, "big")


def events_of(
    blocks: Sequence[int], stored: Sequence[int], evicted: Sequence[int]
) -> tuple[BlockStored | BlockRemoved, ...]:
    """What a replica tells of a prompt of `blocks`: what it stored of it, in runs that follow one another, then what it
    dropped."""
    events: list[BlockStored | BlockRemoved] = []
    fresh, before = set(stored), dict(zip(blocks[1:], blocks, strict=False))
    run: list[int] = []
    for block in (*blocks, None):
        if block is not None and block in fresh:
            run.append(block)
        elif run:
            parent = before.get(run[0])
            names = tuple(name_of(one) for one in run)
            ids = b"".join(map(ids_of, run))
            events.append(BlockStored(names, None if parent is None else name_of(parent), ids, CHUNK_TOKENS, "GPU"))
            run = []
    if evicted:
        events.append(BlockRemoved(tuple(name_of(one) for one in evicted), "GPU"))
    return tuple(events)


class SimulatedReplica:
    """`rate`: tokens a second, prefilled or generated, one request after the other."""

    def __init__(self, name: str, capacity_blocks: int, *, rate: float, random: Random, lost: float) -> None:
        self.name = name
        self.cache = BlockLru(capacity_blocks)
        self.batches: list[bytes] = []  # every batch of events, by sequence number
        self.arrivals: deque[tuple[float, int]] = deque()  # (at, sequence number) of those that arrive at a subscriber
        self._rate, self._random, self._lost = rate, random, lost
        self._free_at = 0.0

    def answer(self, request: Asked, *, delay_s: float) -> tuple[int, float, float]:
        """Hit blocks, tokens computed (prefilled and generated), and when it is done."""
        hits, stored, evicted = self.cache.use(request.blocks)
        work = max(0.0, request.prompt_tokens - hits * CHUNK_TOKENS) + request.output_tokens
        self._free_at = max(self._free_at, request.at_s) + work / self._rate
        self._tell(request, stored, evicted, delay_s)
        return hits, work, self._free_at

    def _tell(self, request: Asked, stored: list[int], evicted: list[int], delay_s: float) -> None:
        events = events_of(request.blocks, stored, evicted)
        if not events:
            return
        seq = len(self.batches)
        self.batches.append(encode_batch(EventBatch(seq, request.at_s, 0, events)))
        if self._random.random() >= self._lost:
            self.arrivals.append((request.at_s + delay_s, seq))
