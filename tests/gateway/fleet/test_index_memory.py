"""What is believed of a replica takes the same memory after a hundred thousand turns of a production trace as after a
million. Some minutes each:

python -m pytest -m prove tests/gateway/fleet/test_index_memory.py
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import psutil
import pytest

from bench.routing.replicas import events_of
from bench.routing.trace import BlockLru, ids_of, load
from engines.kv_events import EventBatch, FeedReset
from gateway.fleet.chain import CHUNK_TOKENS, extend, root
from gateway.fleet.residency import Held, Run

DATA = Path(os.environ.get("TURNKEEP_DATA") or Path(__file__).parents[4] / "shared" / "data") / "mooncake"
BLOCKS = 1000  # that the replica holds
TURNS = 1_000_000
TIMES = 10  # that it is measured
PROMPT_BLOCKS = 4  # of each prompt, its first: a turn more is what shows a leak, not a longer one
GROWTH_MIB = 8  # of the process: what an allocator may scatter


def prompts() -> Iterator[tuple[int, ...]]:
    """Blocks of one request after the other; when the trace ends again from the start, all but the first block anew."""
    asked = [request.blocks for request in load(DATA / "conversation_trace.jsonl")]
    most = max(map(max, asked))
    for again in count():
        for blocks in asked:
            yield tuple(block and block + again * most for block in blocks[:PROMPT_BLOCKS])


def entries(held: Held) -> int:
    """Everything that the index holds on to, whether it can be found there or not."""
    runs: set[Run] = set()
    for run in (*held.nodes.values(), *held.ends):
        link: Run | None = run
        while link is not None and link not in runs:
            runs.add(link)
            link = link.parent
    told = held.told
    kept = sum(len(block.keys) for block in told.blocks.values()) + len(told.credits) + len(told.several)
    return kept + len(held.nodes) + len(held.ends) + len(runs) + sum(len(run.keys) for run in runs)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no trace in {DATA}; TURNKEEP_DATA names the folder of data")
@pytest.mark.parametrize("how", ["noted", "noted and told"])
def test_memory_is_flat_over_a_million_turns_of_trace(how: str) -> None:
    held, cache, start = Held("m", BLOCKS * CHUNK_TOKENS), BlockLru(BLOCKS), root(salt="", model="m")
    told = how == "noted and told"
    if told:
        held.hear(FeedReset(None, "subscribed", whole=True), 0.0)
    sizes, resident = [], []
    for turn, blocks in enumerate(islice(prompts(), TURNS), 1):
        held.note(start.key, extend(start, b"".join(map(ids_of, blocks)))[1], float(turn))
        if told:
            _, stored, evicted = cache.use(blocks)
            held.hear(EventBatch(turn, float(turn), 0, events_of(blocks, stored, evicted)), float(turn))
        if turn % (TURNS // TIMES) == 0:
            gc.collect()
            sizes.append(entries(held))
            resident.append(psutil.Process().memory_info().rss / 2**20)
    print(f"{how}: entries {sizes}, resident MiB {[round(size, 1) for size in resident]}")
    assert max(resident[1:]) <= resident[0] + GROWTH_MIB
    assert max(sizes) <= 8 * BLOCKS, "each block is a node and a key of a run; told, also a block with its key"
    assert len(held.nodes) <= (2 if told else 1) * BLOCKS
    assert not told or len(held.told.blocks) == len(held.told.credits) == len(cache)
