"""`python -m bench.background` runs to its last line: the real engine process, on a small model with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.local.interpreter import ROOT, child_environment


@pytest.mark.prove
def test_bench_background_measures_what_its_page_says(small_model: Path) -> None:
    command = [sys.executable, "-m", "bench.background", "--quick", "--json", "--threads", "1"]
    command += ["--model", str(small_model)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["turns"] == {"alone": 2, "beside": 2}
    assert result["jobs_finished"] >= 1
    assert result["itl_p95_ratio"] > 0
    page = (ROOT / "docs" / "bench.md").read_text()
    assert [name for name in (*result, *result["machine"]) if f"`{name}`" not in page] == []
