"""`python -m bench.shift` runs to its last line: real pages and a real shift, on a small model with random weights."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines.local.interpreter import ROOT, child_environment


@pytest.mark.prove
def test_bench_shift_measures_what_its_page_says(small_model: Path, tmp_path: Path) -> None:
    turns = [{"user": f"Question {n}?", "bot": f"An answer to {n}, at length."} for n in range(40)]
    messages = [
        {"role": role, "content": turn[by]} for turn in turns for role, by in (("user", "user"), ("assistant", "bot"))
    ]
    for folder in ("mtbench101", "chitchat"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mtbench101" / "mtbench101.jsonl").write_text(json.dumps({"task": "CM", "id": 1, "history": turns}))
    with gzip.open(tmp_path / "chitchat" / "chitchat_1000.jsonl.gz", "wt") as lines:
        lines.write(json.dumps({"id": "1", "messages": messages}) + "\n")
    command = [sys.executable, "-m", "bench.shift", "--quick", "--json", "--threads", "1"]
    command += ["--model", str(small_model), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    variants = result["variants"]
    assert set(variants) == {"plain", "without_rotation", "old_positions", "recompute_64"}
    assert variants["plain"]["kl_mean"] > 0
    assert variants["plain"]["shifted_tokens"] == variants["recompute_64"]["shifted_tokens"] + 64
    assert result["kl_mean"] == variants["recompute_64"]["kl_mean"]
    assert result["by_set"]["chitchat"]["kl_mean"] == result["kl_mean"]
    assert result["chats"] == 1
    page = (ROOT / "docs" / "bench.md").read_text()
    names = [*result, *result["by_set"], *variants, *variants["plain"]]
    assert [name for name in names if f"`{name}`" not in page] == []
