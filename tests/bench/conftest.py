"""What the benchmarks' own tests run on: a small model with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines.local.interpreter import ROOT

WORDS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="session")
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
