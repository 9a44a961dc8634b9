"""bench.long_sessions runs, counts more sessions with fewer bits, and all it says is documented."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.local.interpreter import ROOT, child_environment


@pytest.mark.prove
def test_fewer_bits_hold_more_sessions_in_the_same_pool(model_dir: Path) -> None:
    command = [sys.executable, "-m", "bench.long_sessions", "--quick", "--json", "--model", str(model_dir)]
    command += ["--policies", "full,int8"]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    for model in ("real", "random"):
        assert result[model]["int8"]["sessions_over_full"] > 1.2
        [session] = result[model]["int8"]["sessions"]
        assert session["cached_tokens"] >= session["tokens"]
        assert session["ratio"] < 1.5
    page = (ROOT / "docs" / "bench.md").read_text()
    names = (*session, *result["random"]["int8"]["fit"])
    assert [name for name in names if f"`{name}`" not in page and name not in ("tokens", "pool")] == []
