"""The routing bench: its LRU is the oracle's, its replicas tell what they do, and it runs to its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from bench.routing.replicas import SimulatedReplica
from bench.routing.trace import Asked, BlockLru, best, load
from engines.kv_events import decode_batch
from engines.local.interpreter import ROOT, child_environment
from gateway.fleet.residency import Held

DATA = Path(os.environ.get("TURNKEEP_DATA") or ROOT.parent / "shared" / "data") / "mooncake"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no trace in {DATA}; TURNKEEP_DATA names the folder of data")
def test_hits_of_one_cache_are_those_of_the_oracle() -> None:
    told = json.loads((DATA / "lru_oracle.json").read_text())["results"]["conversation_trace"]
    asked = load(DATA / "conversation_trace.jsonl")
    for capacity in ("1000", "30000", "None"):
        cache = BlockLru(None if capacity == "None" else int(capacity), tail_first=False)
        assert sum(cache.use(request.blocks)[0] for request in asked) == told[capacity]["hit_blocks"]


def test_a_cache_that_evicts_the_tail_first_keeps_a_prefix() -> None:
    cache = BlockLru(5)
    cache.use((1, 2, 3, 4))
    cache.use((9, 8))
    assert cache.matched((1, 2, 3, 4)) == 3
    assert best([Asked(0, (1, 2), 1, 1), Asked(1, (1, 2), 1, 1)], 5) == 1


def test_what_a_simulated_replica_tells_is_what_it_holds() -> None:
    random, held = Random(3), Held("trace", 40 * 16)
    held.live = True
    replica = SimulatedReplica("r", 40, rate=1e9, random=random, lost=0.0)
    paths = [tuple(100 * n + place for place in range(12)) for n in range(9)]
    for number in range(200):
        path = random.choice(paths)[: random.randrange(1, 13)]
        replica.answer(Asked(float(number), path, 1.0, 1.0), delay_s=0.0)
    for seq, payload in enumerate(replica.batches):
        held.hear(decode_batch(seq, payload), 0.0)
    assert held.held_tokens == 16 * len(replica.cache)


def test_bench_routing_runs_to_its_last_line(tmp_path: Path) -> None:
    random, lines, blocks = Random(5), [], {n: [0, 10_000 * n + 1] for n in range(1, 30)}
    for second in range(0, 1300, 2):
        chat = random.randrange(1, 30)
        blocks[chat].append(blocks[chat][-1] + 1)
        told = {"timestamp": 1000 * second, "input_length": 512 * len(blocks[chat]), "output_length": 100}
        lines.append(json.dumps(told | {"hash_ids": blocks[chat]}))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(lines))
    command = [sys.executable, "-m", "bench.routing", "--trace", str(trace), "--replicas", "3", "--capacity", "400"]
    done = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["hit_over_reachable"] > 0.9
    assert {told["policy"] for told in result["rows"]} >= {"ours", "round robin", "least load", "plain ring"}
    page = (ROOT / "docs" / "bench.md").read_text()
    names = [*result, *result["rows"][0], *result["parameters"]]
    assert [name for name in names if f"`{name}`" not in page] == []
