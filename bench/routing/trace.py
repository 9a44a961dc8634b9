"""Mooncake's conversation trace, and what caches could reuse of it at best.

A block of the trace is 512 tokens; here it is one chunk of 16 token ids, and every count of tokens is divided by 32
alike, so that the production code runs unchanged. The ids of a block are its number, repeated.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.fleet.chain import CHUNK_TOKENS

BLOCK_TOKENS = 512  # of the trace
SCALE = BLOCK_TOKENS // CHUNK_TOKENS


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when, its blocks, and its tokens (of this bench: 32 of the trace's)."""

    at_s: float
    blocks: tuple[int, ...]
    prompt_tokens: float
    output_tokens: float


def load(path: Path, limit: int | None = None) -> list[Asked]:
    asked = []
    with path.open() as lines:
        for line in lines:
            told = json.loads(line)
            blocks = tuple(told["hash_ids"])
            sizes = (told["input_length"] / SCALE, told["output_length"] / SCALE)
            asked.append(Asked(told["timestamp"] / 1000.0, blocks, *sizes))
            if limit is not None and len(asked) >= limit:
                break
    return asked


def ids_of(block: int) -> bytes:
    return array("I", [block] * CHUNK_TOKENS).tobytes()


class BlockLru:
    """An LRU of blocks: the least recently used goes, one at a time.

    `tail_first`: of one prompt, the last block goes first, as in vLLM and in our engine: what is left of a prompt is
    still a prefix of it. Otherwise in the order of the prompt, as the oracle beside the trace was made: the first block
    goes first, and the rest is of no use.
    """

    def __init__(self, capacity: int | None, *, tail_first: bool = True) -> None:
        self.capacity = capacity
        self._tail_first = tail_first
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def matched(self, blocks: Iterable[int]) -> int:
        count = 0
        for block in blocks:
            if block not in self._held:
                break
            count += 1
        return count

    def use(self, blocks: Sequence[int]) -> tuple[int, list[int], list[int]]:
        """Hits (of the longest prefix), the blocks that were stored, and those that were evicted for them."""
        hits = self.matched(blocks)
        stored, evicted = [], []
        if self._tail_first:
            for block in blocks:  # none of them goes for another one of them
                if block in self._held:
                    self._held.move_to_end(block)
        for block in blocks:
            if block in self._held:
                self._held.move_to_end(block)
                continue
            if self.capacity is not None and len(self._held) >= self.capacity:
                evicted.append(self._held.popitem(last=False)[0])
            self._held[block] = None
            stored.append(block)
        if self._tail_first:
            for block in reversed(blocks):
                if block in self._held:
                    self._held.move_to_end(block)
        return hits, stored, evicted

    def holds(self, block: int) -> bool:
        return block in self._held


def scored(hits: int) -> int:
    """Hits that count: the first block is one prompt that nearly all requests share."""
    return max(0, hits - 1)


def best(asked: Sequence[Asked], capacity: int | None, *, tail_first: bool = True) -> int:
    """Hits of one cache of `capacity` blocks (None: infinite) that every request goes to."""
    cache = BlockLru(capacity, tail_first=tail_first)
    return sum(scored(cache.use(request.blocks)[0]) for request in asked)
