"""`python -m bench.tiers` runs to its last line, on a small model with random weights, and says what its page says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.local.interpreter import ROOT, child_environment


@pytest.mark.prove
def test_bench_tiers_measures_what_its_page_says(small_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.tiers", "--quick", "--json", "--threads", "1"]
    command += ["--model", str(small_model), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    back, many = result["coming_back"], result["many"]
    assert back["same_answer"]
    assert set(back["ttft_s"]) == {"computed", "device", "host", "disk", "disk_resumed", "restarted"}
    assert many["host_tier"]["hit"] >= many["host_tier"]["hit_ideal"] - 0.02
    assert many["host_tier"]["hit"] > many["device_only"]["hit"]
    assert not many["host_tier"]["pieces_damaged"]
    page = (ROOT / "docs" / "bench.md").read_text()
    names = [*back, *back["ttft_s"], "hit", "hit_from_host", "hit_ideal", "ttft_later_turns_p50_s"]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert not list(tmp_path.iterdir()), "it leaves files behind"
