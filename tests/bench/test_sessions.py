"""`python -m bench.sessions` runs to its last line: the real engine process, on a small model with random weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engines.local.interpreter import ROOT, child_environment

WORDS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers that speaks bytes, with the echo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model") / "small"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=258,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in WORDS:
        shutil.copy(ROOT / "engines" / "echo_model" / name, folder / name)
    return folder


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
