"""`python -m bench.sessions` runs to its last line: the real engine process, on a small model with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.local.interpreter import ROOT, child_environment


@pytest.mark.prove
def test_bench_sessions_measures_what_its_page_says(small_model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.sessions",
        "--quick",
        "--json",
        "--threads",
        "1",
        "--model",
        str(small_model),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["different"] == []
    # prompts of turns 3 and 4: 160 + 72 n + 8 (n - 1) tokens; all but the 72 new ones and one generated are reused
    assert result["cached_ratio_from_turn_3"] == round((392 + 472 - 2 * 73) / (392 + 472), 4)
    assert result["ttft_last_turn_off_over_on"] > 0
    assert result["batch_speedup"] > 0
    assert result["ttft_turn_10_off_over_on"] is None  # there are only four turns
    page = (ROOT / "docs" / "bench.md").read_text()
    assert [name for name in (*result, *result["turns"]["1"], *result["machine"]) if f"`{name}`" not in page] == []
