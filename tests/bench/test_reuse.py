"""What bench.reuse says: the ceiling, the waste and the bars by hand, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from bench.reuse import BARS, QUICK, Asked, Sizes, ceiling, figures, missed, workloads
from bench.talk import Answer
from engines.local.interpreter import ROOT, child_environment
from gateway.sessions.tokens import ModelTokens

SIDE = {
    "requests": 2, "prompt_tokens": 100, "output_tokens": 20, "hit": 0.6, "ceiling": 0.7, "ttft_mean_ms": 100.0,
    "ttft_p50_ms": 90.0, "tokens_s": 20.0, "cpu_s": 10.0, "waste": 0.02,
}  # fmt: skip


def asked(prompt: list[int], output: tuple[int, ...], at_s: float, until_s: float) -> Asked:
    return Asked("c", array("I", prompt), Answer(at_s, (until_s,), 0.0, output, len(prompt), 0))


def test_the_ceiling_counts_prompts_sent_before_and_answers_ended_before() -> None:
    first = asked([1, 2, 3, 4], (5, 6, 7), 0.0, 1.0)
    assert ceiling([first]) == 0
    assert ceiling([first, asked([1, 2, 3, 9], (5,), 0.5, 2.0)]) == 3
    goes_on = [1, 2, 3, 4, 5, 6, 7, 8]
    assert ceiling([first, asked(goes_on, (5,), 1.5, 2.0)]) == 6  # the last token of an answer has no K/V
    assert ceiling([first, asked(goes_on, (5,), 0.5, 2.0)]) == 4  # it was still being written
    assert ceiling([first, asked([1, 2, 3, 4], (5,), 1.5, 2.0)]) == 3  # one token is always computed


def test_ratios_and_the_bars_they_miss() -> None:
    off = SIDE | {"ttft_mean_ms": 200.0, "tokens_s": 10.0, "cpu_s": 30.0, "hit": 0.0}
    told = figures(SIDE, off)
    assert (told["ttft_ratio"], told["throughput_ratio"], told["cpu_ratio"]) == (0.5, 2.0, 3.0)
    assert missed("system", told) == []
    assert missed("turns", told) == ["ttft_ratio", "hit"]
    assert missed("turns", told | {"ttft_ratio": 0.4, "hit": 0.69}) == []  # the ceiling is below the bar
    assert missed("rag", told | {"waste": 0.05, "throughput_ratio": 1.2}) == ["throughput_ratio", "waste"]


def test_prompts_are_as_long_as_the_table_has_them_and_each_document_is_asked_for_twice(model_dir: Path) -> None:
    tokens = ModelTokens.load(model_dir, name="m")
    made = workloads(tokens, Sizes())
    assert made.keys() == BARS.keys()

    def size(chain: object) -> int:
        system, user = chain.system, chain.texts[0]  # type: ignore[attr-defined]
        return len(tokens.render([{"role": "system", "content": system}, {"role": "user", "content": user}])) // 4

    assert all(690 < size(chain) < 730 for chain in made["system"])
    assert all(2180 < size(chain) < 2240 for chain in made["rag"])
    documents = [chain.texts[0][:200] for chain in made["rag"]]
    assert sorted(documents.count(document) for document in documents) == [2] * 20
    assert [len(chain.texts) for chain in made["turns"]] == [16, 16]


@pytest.mark.prove
def test_bench_reuse_runs_and_every_figure_is_documented(model_dir: Path) -> None:
    assert QUICK.turns < Sizes().turns
    command = [sys.executable, "-m", "bench.reuse", "--quick", "--json", "--model", str(model_dir), "--only", "turns"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["turns"]["hit"] > 0.5
    page = (ROOT / "docs" / "bench.md").read_text()
    names = (*result["turns"], *result["second_request"])
    assert [name for name in names if f"`{name}`" not in page and not name.endswith("_cpu")] == []
