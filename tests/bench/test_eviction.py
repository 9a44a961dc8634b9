"""The eviction bench: its LRU is the oracle's, nothing beats the future, and a row says what it must."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from bench.eviction import BlockCache, belady, compared, equals_oracle, lru_as_the_oracle, replayed
from bench.routing.trace import Asked, BlockLru, load
from engines.local.interpreter import ROOT
from engines.local.kv.eviction import Lru
from engines.local.kv.policies import POLICIES, make_policy

DATA = Path(os.environ.get("TURNKEEP_DATA") or ROOT.parent / "shared" / "data") / "mooncake"


def chats(number: int, seed: int) -> list[Asked]:
    """Chats of up to 6 turns over one system prompt, each a block longer than the last; the last block is half full."""
    random, asked, paths = Random(seed), [], {chat: [1, 100 * chat] for chat in range(2, 22)}
    for second in range(number):
        path = paths[random.randrange(2, 22)]
        path.append(path[-1] + 1)
        asked.append(Asked(10.0 * second, tuple(path), 16.0 * len(path) - 8, 1.0))
    return asked


@pytest.mark.prove
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no trace in {DATA}; TURNKEEP_DATA names the folder of data")
def test_the_engines_lru_hits_what_the_oracle_hits() -> None:
    told = json.loads((DATA / "lru_oracle.json").read_text())["results"]["synthetic_trace"]
    hits = equals_oracle(load(DATA / "synthetic_trace.jsonl"), {"1000": told["1000"]})
    assert hits == {"1000": [10050, 10050]}


def test_the_engines_lru_hits_what_a_plain_one_hits() -> None:
    """The plain one is that of the routing bench, which hits what the oracle hits."""
    asked = chats(150, seed=3)
    for capacity in (25, 60):
        plain = BlockLru(capacity, tail_first=False)
        assert sum(lru_as_the_oracle(asked, capacity)) == sum(plain.use(request.blocks)[0] for request in asked)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_no_policy_beats_the_future(name: str) -> None:
    asked = chats(120, seed=len(name))
    assert sum(replayed(asked, 30, make_policy(name))) <= sum(belady(asked, 30))


def test_belady_is_the_best_of_all_ways_to_evict() -> None:
    asked = [
        Asked(float(at), blocks, 1, 1) for at, blocks in enumerate([(1, 2), (3,), (1, 4), (3,), (1, 2), (3,), (1, 4)])
    ]
    assert sum(belady(asked, 3)) == _best(asked, 3)


def test_what_hangs_on_a_block_goes_before_it() -> None:
    held = BlockCache(4, Lru())
    for second, blocks in enumerate([(1, 2, 3), (9,), (8,)]):
        held.use(Asked(float(second), blocks, 1, 1))
    assert held.matched((1, 2, 3)) == 2


def test_a_row_holds_every_policy_and_the_share_of_the_gap() -> None:
    [row] = compared(chats(80, seed=1), [30])["rows"]
    assert set(row["hit_rate"]) == {"lru_oracle", *POLICIES, "cost_aware_frozen", "belady"}
    assert row["beats_all"] in (True, False)


def _best(asked: Sequence[Asked], capacity: int) -> int:
    """By trying every set of blocks that could be kept after each request."""

    @cache
    def most(number: int, kept: frozenset[int]) -> int:
        if number == len(asked):
            return 0
        blocks = asked[number].blocks
        hits = next((at for at, block in enumerate(blocks) if block not in kept), len(blocks))
        others = sorted(kept - set(blocks))
        room = min(capacity - len(blocks), len(others))
        return hits + max(most(number + 1, frozenset((*blocks, *rest))) for rest in combinations(others, room))

    return most(0, frozenset())
