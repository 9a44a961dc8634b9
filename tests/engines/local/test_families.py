"""Greedy output equals `generate` for many families (tiny random weights, float32): packed, chunked, from the cache.

What one family needs of the attention function, another does not: sliding windows, softcap, sinks, scalings of its own,
K/V of different sizes. What cannot be packed rightly is refused at load, with the reason.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.model import ModelRefused, adopt
from tests.engines.local.tiny import Answers, request

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
PLAIN_HEADS = ("num_key_value_heads", "head_dim")  # what older configs do not take
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ()),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}, ()),
    "mistral with window": ("mistral", {"sliding_window": 24}, ()),
    "qwen2": ("qwen2", {}, ()),
    "qwen2 with window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}, ()),
    "qwen3": ("qwen3", {}, ()),
    "gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16}, ()),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 16}, ()),
    "gpt-oss": (
        "gpt_oss",
        {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        (),
    ),
    "phi3": ("phi3", {}, ()),
    "granite": ("granite", {}, ()),
    "smollm3": ("smollm3", {}, ()),
    "qwen3 moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, ()),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}, PLAIN_HEADS),
}


def build(kind: str, changes: dict[str, Any], without: tuple[str, ...] = ()) -> Any:
    torch.manual_seed(0)
    values = {name: value for name, value in (BASE | changes).items() if name not in without}
    module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values), dtype=torch.float32).eval()
    for parameter in module.parameters():  # spread, so that the likeliest token stands out
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.12)
    module.generation_config.eos_token_id = None
    return module


def asked() -> list[tuple[list[int], int]]:
    draw = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=draw).tolist()

    shared = some(40)
    prompts = [some(5), shared + some(9), some(33), shared + some(17), some(1), some(64)]
    return list(zip(prompts, [9, 12, 6, 9, 30, 5], strict=True))


@pytest.mark.parametrize(("page", "name"), [(8 if i % 2 else 16, name) for i, name in enumerate(FAMILIES)])
def test_greedy_equals_generate(name: str, page: int) -> None:
    module = build(*FAMILIES[name])
    expected = {}
    with torch.inference_mode():
        for i, (prompt, count) in enumerate(asked()):
            out = module.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
            )
            expected[str(i)] = out[0, len(prompt) :].tolist()
    model = adopt(module, name=name, decode=lambda ids: "")
    config = EngineConfig(
        block_size=page, pool_bytes=64 * page * model.kv_bytes_per_token, max_batch_tokens=24, max_running=6,
        debug_nan_fill=True,
    )  # fmt: skip
    engine = LocalEngine(model, config, time.monotonic)
    requests = [request(str(i), prompt, count) for i, (prompt, count) in enumerate(asked())]
    first = Answers(engine).run(*requests)
    again = Answers(engine).run(*requests)
    assert first.ids == expected
    assert again.ids == expected
    assert again.cached["5"] >= 64 - page


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
        (
            "phi3",
            {
                "original_max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                    "original_max_position_embeddings": 64,
                },
            },
            "rope_type",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}, "2 of 4 layers attend"),
        ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2}, "AttentionInterface|layers attend"),
        ("bloom", {"n_head": 4, "n_layer": 4}, "AttentionInterface"),
    ],
    ids=["dynamic rope", "longrope", "convolution hybrid", "linear hybrid", "bloom"],
)
def test_what_cannot_be_packed_is_refused_with_the_reason(kind: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        adopt(build(kind, changes), name=kind, decode=lambda ids: "")
