"""How long the first token takes tells nobody what another tenant has asked: measured in pairs, through the gateway.

A round has a prompt of its own. Tenant A asks it once, so that it is cached; then, in changing order, A asks it again
(`same`), B asks it (`other`), and B asks one of the same length that nobody has asked (`cold`). The rounds are paired,
so that what the machine does meanwhile falls on all three. The test is Wilcoxon's of signed ranks over the pairs, its
distribution drawn by random signs: `other` must not differ from `cold`, and must be equivalent to it (two one-sided
tests) within a share of what a leak would give. The control, one salt for all tenants, shows that it sees the leak.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest

from bench.conversations import WORDS
from bench.processes import python, started
from tests.faults.processes import machine
from tests.gateway.served import Served, served

pytestmark = [pytest.mark.model, pytest.mark.prove, pytest.mark.timeout(3000)]
ROUNDS = int(os.environ.get("TURNKEEP_TEST_ROUNDS", "200"))
CONTROL_ROUNDS = min(60, ROUNDS)
WORDS_EACH = 90  # of a prompt: 110 to 125 tokens, three whole blocks of them
CACHED = 96  # tokens that a hit reads from the cache, at least
ALPHA = 0.001
MARGIN = 0.15  # of the median difference between a miss and a hit: what still counts as the same
SIGNS = 20_000
RESULT = Path(__file__).parents[2] / "bench" / "results" / "cache-timing.json"
WAYS = ("same", "other", "cold")


@dataclass
class Samples:
    ttft_ms: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    cached: dict[str, list[int]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def differences(self, one: str, other: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array(self.ttft_ms[one]) - np.array(self.ttft_ms[other])

    def told(self) -> dict[str, Any]:
        leak_ms = float(np.median(self.differences("cold", "same")))
        margin_ms = MARGIN * leak_ms
        moved = self.differences("other", "cold")
        return {
            "rounds": len(moved),
            "ttft_ms_p50": {way: round(statistics.median(values), 1) for way, values in self.ttft_ms.items()},
            "cached_tokens": {way: [min(values), max(values)] for way, values in self.cached.items()},
            "cold_less_same_ms_p50": round(leak_ms, 1),
            "other_less_cold_ms_p50": round(float(np.median(moved)), 2),
            "p_differs": two_sided(moved),
            "equivalence_margin_ms": round(margin_ms, 1),
            "p_not_equivalent": max(above(moved + margin_ms), above(margin_ms - moved)),
            "p_same_is_no_faster_than_other": above(self.differences("other", "same")),
        }


def signed_ranks(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Each value's rank by its size, with its sign."""
    ranks = np.empty(len(values))
    ranks[np.argsort(np.abs(values), kind="stable")] = np.arange(1, len(values) + 1)
    return np.sign(values) * ranks


def above(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """One-sided p: that the values lie around 0 or below it, seeing how far above it they are."""
    ranks = signed_ranks(values)
    signs = np.random.default_rng(7).choice((-1.0, 1.0), size=(SIGNS, len(values)))
    return float((1 + np.count_nonzero(signs @ np.abs(ranks) >= ranks.sum())) / (SIGNS + 1))


def two_sided(values: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    return min(1.0, 2 * min(above(values), above(-values)))


def prompt_of(seed: str) -> str:
    random = Random(seed)
    return " ".join(random.choice(WORDS) for _ in range(WORDS_EACH))


def ask(gateway: Served, key: dict[str, str], prompt: str) -> tuple[float, int]:
    """(TTFT in ms, cached tokens) of a stateless streamed chat."""
    body = {
        "model": "small", "messages": [{"role": "user", "content": prompt}], "max_tokens": 1, "temperature": 0,
        "history": "off",
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, first, cached = time.perf_counter(), 0.0, -1
    with gateway.client.stream("POST", "/v1/chat/completions", json=body, headers=key) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            told = orjson.loads(line[6:])
            if not first and told["choices"] and told["choices"][0]["delta"].get("content"):
                first = time.perf_counter()
            if told.get("usage"):
                cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first, "no text came"
    return (first - began) * 1000, cached


def measured(gateway: Served, rounds: int, seed: str) -> Samples:
    ann, bob = gateway.key(tenant="ann"), gateway.key(tenant="bob")
    samples = Samples()
    for way in range(3):  # connections, compiled statements, the model's first steps
        ask(gateway, (ann, bob)[way % 2], prompt_of(f"{seed}-warm-{way}"))
    for number in range(rounds):
        prompt, fresh = prompt_of(f"{seed}-{number}"), prompt_of(f"{seed}-{number}-fresh")
        ask(gateway, ann, prompt)
        asked = {"same": (ann, prompt), "other": (bob, prompt), "cold": (bob, fresh)}
        order = list(asked)
        Random(number).shuffle(order)
        for way in order:
            ttft_ms, cached = ask(gateway, *asked[way])
            samples.ttft_ms[way].append(ttft_ms)
            samples.cached[way].append(cached)
    return samples


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = [
        "--model",
        str(model_dir),
        "--served-name",
        "small",
        "--port",
        "0",
        "--threads",
        "1",
        "--exit-with-parent",
    ]
    command = python("gateway.cli", "engine", *options, "--pool-bytes", str(1 << 30))
    with started(command, folder=tmp_path_factory.mktemp("engine"), ready='"event":"ready"') as running:
        line = next(line for line in running.said.splitlines() if '"event":"ready"' in line)
        yield str(orjson.loads(line)["url"])


@contextmanager
def gateway_of(folder: Path, engine: str, model_dir: Path) -> Iterator[Served]:
    upstream = {"url": engine, "name": "small", "kind": "turnkeep"}
    with served(folder, embed=False, auth=True, upstreams=(upstream,), tokenizers={"small": model_dir}) as running:
        deadline = time.monotonic() + 120
        while running.client.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield running


def test_anothers_cached_prompt_takes_as_long_as_one_that_nobody_asked(
    engine: str, model_dir: Path, tmp_path: Path
) -> None:
    with gateway_of(tmp_path / "salted", engine, model_dir) as gateway:
        salted = measured(gateway, ROUNDS, "salted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.app.cache_salt", lambda secret, tenant: "one-for-all")
        with gateway_of(tmp_path / "control", engine, model_dir) as gateway:
            control = measured(gateway, CONTROL_ROUNDS, "control")
    result = {
        "test": "Wilcoxon signed ranks over pairs, by random signs; equivalence: two one-sided",
        "salted": salted.told(),
        "control_one_salt_for_all": control.told(),
        "machine": machine(),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    found, leaking = result["salted"], result["control_one_salt_for_all"]
    assert isinstance(found, dict)
    assert isinstance(leaking, dict)
    # what the engine says
    assert min(salted.cached["same"]) >= CACHED
    assert max(salted.cached["other"]) == max(salted.cached["cold"]) < CACHED
    assert min(control.cached["other"]) >= CACHED
    # what the clock says
    assert found["p_same_is_no_faster_than_other"] < ALPHA, "the same tenant does not feel its cache: nothing is tested"
    assert found["p_differs"] > ALPHA, f"another tenant's prompt is told apart by its TTFT: {found}"
    assert found["p_not_equivalent"] < ALPHA, f"too few samples, or too noisy, to say that it is the same: {found}"
    # that the test can see
    assert leaking["p_differs"] < ALPHA, "the leak of one salt for all is not seen: the test is blind"
    assert leaking["p_not_equivalent"] > ALPHA
