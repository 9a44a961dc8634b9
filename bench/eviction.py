"""Which cached blocks to give up: the engine's policies on two traces of prefix blocks, and the best there could be.

    python -m bench.eviction --data ../shared/data --json [--quick]

Policies and evictor are the engine's own (engines.local.kv), the cache around them is the bench's. docs/bench.md says
what each figure is. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.routing.trace import BLOCK_TOKENS, SCALE, Asked, load
from engines.local.kv.cost_aware import CostAware
from engines.local.kv.eviction import AdaptiveTtl, EvictionPolicy, Lfu, Lru, Used
from engines.local.kv.evictor import Evictor

DATA = Path(__file__).parents[2] / "shared" / "data"
TRACES = ("conversation_trace", "synthetic_trace")
CAPACITIES = (1000, 3000, 10_000)
TTLS = tuple({"factor": factor, "first_s": first_s} for factor, first_s in product((1.0, 2.0, 4.0), (60.0, 300.0)))
QUICK_REQUESTS = 1500
NEVER = 1 << 60

Maker = Callable[[], EvictionPolicy]


class BlockCache:
    """`capacity` blocks under a policy of the engine. What a request needs is held while it runs, and let go at its end
    as one path, whose tail goes first; a block that others hang on waits for them.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy, *, chains: bool = True) -> None:
        self.policy = policy
        self._page: dict[int, int] = {}
        self._block = [0] * (capacity + 1)
        self._free = list(range(capacity, 0, -1))
        self._parent: dict[int, int] = {}  # of resident blocks
        self._children: dict[int, int] = {}
        rules: dict[str, Any] = {"leaf": self._is_leaf, "above": self._above} if chains else {}
        self._evictor = Evictor(capacity, policy, **rules)

    def matched(self, blocks: Sequence[int]) -> int:
        return next((at for at, block in enumerate(blocks) if block not in self._page), len(blocks))

    def use(self, asked: Asked) -> int:
        """Hits of the longest prefix."""
        blocks, hits = asked.blocks, self.matched(asked.blocks)
        self._evictor.remove(self._pages([block for block in blocks if block in self._page]))
        self._store(blocks, asked.at_s)
        last = (asked.prompt_tokens * SCALE) % BLOCK_TOKENS
        names, gains = np.array(blocks, np.int64) + 1, np.ones(len(blocks))
        if last:
            names[-1], gains[-1] = -names[-1], last / BLOCK_TOKENS
        self._let_go(blocks, Used(names, gains), asked.at_s)
        return hits

    def use_as_the_oracle(self, asked: Asked) -> int:
        """The method of lru_oracle.json: block after block, each a use of its own, nothing held meanwhile."""
        blocks, hits, at = asked.blocks, self.matched(asked.blocks), 0
        while at < len(blocks):
            resident = blocks[at] in self._page
            stop = next((i for i in range(at, len(blocks)) if (blocks[i] in self._page) != resident), len(blocks))
            part = blocks[at:stop]
            if resident:
                self._evictor.remove(self._pages(part))
            self._store(part, asked.at_s)
            backwards = part[::-1]  # the evictor takes the end of a path first, the oracle its head
            self._let_go(backwards, Used(np.array(backwards, np.int64) + 1, np.ones(len(part))), asked.at_s)
            at = stop
        return hits

    def _store(self, blocks: Sequence[int], now_s: float) -> None:
        new = [block for block in blocks if block not in self._page]
        if len(new) > len(self._free):
            self._evictor.evict(len(new) - len(self._free), now_s, self._gone)
        for block in new:
            page = self._free.pop()
            self._page[block], self._block[page] = page, block
        for parent, block in zip((None, *blocks), blocks, strict=False):
            if parent is not None and block not in self._parent:
                self._parent[block] = parent
                self._children[parent] = self._children.get(parent, 0) + 1

    def _let_go(self, blocks: Sequence[int], used: Used, now_s: float) -> None:
        self._evictor.add(self._pages(blocks), self.policy.groups(used, now_s), now_s)

    def _pages(self, blocks: Sequence[int]) -> np.ndarray:
        return np.array([self._page[block] for block in blocks], np.int32)

    def _gone(self, page: int) -> None:
        block = self._block[page]
        del self._page[block]
        self._free.append(page)
        if (parent := self._parent.pop(block, None)) is not None:
            self._children[parent] -= 1

    def _is_leaf(self, page: int) -> bool:
        return not self._children.get(self._block[page])

    def _above(self, page: int) -> int:
        return self._page.get(self._parent.get(self._block[page], -1), 0)


def replayed(asked: Sequence[Asked], capacity: int, policy: EvictionPolicy, *, frozen: bool = False) -> tuple[int, int]:
    """Hits in the first and in the second half. `frozen`: what it learned in the first half is all it learns."""
    cache, half, hits = BlockCache(capacity, policy), len(asked) // 2, [0, 0]
    for number, request in enumerate(asked):
        if frozen and number == half and isinstance(policy, CostAware):
            policy.learn(request.at_s)
            policy.learning = False
        hits[number >= half] += cache.use(request)
    return hits[0], hits[1]


def lru_as_the_oracle(asked: Sequence[Asked], capacity: int | None) -> tuple[int, int]:
    """Hits in the first and in the second half."""
    room = capacity or len({block for request in asked for block in request.blocks})
    cache, half, hits = BlockCache(room, Lru(), chains=False), len(asked) // 2, [0, 0]
    for number, request in enumerate(asked):
        hits[number >= half] += cache.use_as_the_oracle(request)
    return hits[0], hits[1]


def belady(asked: Sequence[Asked], capacity: int) -> tuple[int, int]:
    """Hits of the best cache there is, one that knows the future: what is used again last goes first. By the rules of
    `BlockCache`: a request's blocks are held while it runs."""
    next_use, later = [[0] * len(request.blocks) for request in asked], dict[int, int]()
    for number in range(len(asked) - 1, -1, -1):
        for place, block in enumerate(asked[number].blocks):
            next_use[number][place] = later.get(block, NEVER)
            later[block] = number
    held: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    half, hits = len(asked) // 2, [0, 0]
    for number, request in enumerate(asked):
        hits[number >= half] += next((i for i, b in enumerate(request.blocks) if b not in held), len(request.blocks))
        for block in request.blocks:
            held[block] = -1  # in use: nobody on the heap has this next use
        while len(held) > capacity:
            use, _, block = heapq.heappop(heap)
            if held.get(block) == -use:
                del held[block]
        for place, (block, use) in enumerate(zip(request.blocks, next_use[number], strict=True)):
            held[block] = use
            heapq.heappush(heap, (-use, -place, block))
    return hits[0], hits[1]


def fitted(asked: Sequence[Asked], makers: Sequence[tuple[Any, Maker]], capacities: Sequence[int]) -> tuple[Any, Maker]:
    """The candidate with the most hits, over all capacities together, in the first half, which is all it sees."""
    first = asked[: len(asked) // 2]
    return max(makers, key=lambda maker: sum(sum(replayed(first, capacity, maker[1]())) for capacity in capacities))


def compared(asked: Sequence[Asked], capacities: Sequence[int]) -> dict[str, Any]:
    """Fit, then replay the whole trace and count its second half."""
    lives, ttl = fitted(asked, [(life, partial(AdaptiveTtl, **life)) for life in TTLS], capacities)
    total = sum(len(request.blocks) for request in asked[len(asked) // 2 :])
    rows = []
    for capacity in capacities:
        began, hits = time.monotonic(), {}
        hits["lru_oracle"] = lru_as_the_oracle(asked, capacity)[1]
        hits["lru"] = replayed(asked, capacity, Lru())[1]
        hits["lfu"] = replayed(asked, capacity, Lfu())[1]
        hits["adaptive_ttl"] = replayed(asked, capacity, ttl())[1]
        hits["cost_aware"] = replayed(asked, capacity, CostAware())[1]
        hits["cost_aware_frozen"] = replayed(asked, capacity, CostAware(), frozen=True)[1]
        hits["belady"] = belady(asked, capacity)[1]
        gap = hits["belady"] - hits["lru"]
        best = max(value for name, value in hits.items() if name not in ("cost_aware", "cost_aware_frozen", "belady"))
        row = {
            "capacity_blocks": capacity,
            "hit_rate": {name: round(value / total, 4) for name, value in hits.items()},
            "gap_closed": round((hits["cost_aware"] - hits["lru"]) / gap, 3) if gap else None,
            "gap_closed_frozen": round((hits["cost_aware_frozen"] - hits["lru"]) / gap, 3) if gap else None,
            "beats_all": hits["cost_aware"] > best,
            "beats_all_frozen": hits["cost_aware_frozen"] > best,
            "seconds": round(time.monotonic() - began, 1),
        }
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return {"second_half_blocks": total, "adaptive_ttl": lives, "rows": rows}


def equals_oracle(asked: Sequence[Asked], told: dict[str, dict[str, float]]) -> dict[str, list[int]]:
    """By capacity: our hits, and the oracle's."""
    capacities = {key: None if key == "None" else int(key) for key in told}
    return {
        key: [sum(lru_as_the_oracle(asked, capacity)), int(told[key]["hit_blocks"])]
        for key, capacity in capacities.items()
    }


def measure(data: Path, *, quick: bool = False) -> dict[str, Any]:
    oracle = json.loads((data / "mooncake" / "lru_oracle.json").read_text())["results"]
    result: dict[str, Any] = {"lru_equals_oracle": True, "default_beats_all": True, "lru": {}, "traces": {}}
    for name in TRACES:
        asked = load(data / "mooncake" / f"{name}.jsonl")
        told = {key: oracle[name][key] for key in ("1000",)} if quick else oracle[name]
        result["lru"][name] = equals_oracle(asked, told)
        result["lru_equals_oracle"] &= all(ours == theirs for ours, theirs in result["lru"][name].values())
        result["traces"][name] = compared(
            asked[:QUICK_REQUESTS] if quick else asked, CAPACITIES[:1] if quick else CAPACITIES
        )
        result["default_beats_all"] &= all(row["beats_all"] for row in result["traces"][name]["rows"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.eviction", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, default=None, help="folder of data; default: $TURNKEEP_DATA")
    parser.add_argument("--quick", action="store_true", help="a few requests, one capacity: shows that it runs")
    parser.add_argument("--json", action="store_true", help="print only the JSON object on standard output")
    args = parser.parse_args()
    result = measure(args.data or Path(os.environ.get("TURNKEEP_DATA") or DATA), quick=args.quick)
    if not args.json:
        print("Which blocks to give up")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
