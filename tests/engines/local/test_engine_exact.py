"""Greedy output of the engine is transformers' `generate`, token for token, on the real model in float32."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.model import LoadedModel, load_model
from tests.engines.local.tiny import Answers, request

NEAR_TIE = 1e-4  # a difference is excused only where the two best logits lie within this
LONG_EVERY, LONG, SHORT = 32, 24, 4  # tokens to generate

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LoadedModel:
    return load_model(model_dir)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def prompts(model: LoadedModel, count: int = 64) -> list[list[int]]:
    """Chats and plain beginnings of mixed lengths (3 to about 250 ids), from MT-bench where the data is at hand."""
    root = Path(os.environ.get("TURNKEEP_DATA", "../shared/data"))
    questions = root / "mtbench" / "question.jsonl"
    if questions.is_file():
        texts = [json.loads(line)["turns"][0] for line in questions.read_text().splitlines()]
    else:
        topics = (
            "rivers",
            "prime numbers",
            "bread",
            "the moon",
            "chess",
            "glaciers",
            "a letter to a friend",
            "sorting",
        )
        asks = (
            "Tell me about",
            "What is hard in",
            "Write a poem on",
            "List facts about",
            "Explain",
            "Sum up",
            "Ask",
            "Sing",
        )
        texts = [f"{ask} {topic}. Then add a word on it, please." for ask in asks for topic in topics]
    return [_ids(model.tokenizer, text, i) for i, text in enumerate(texts[:count])]


def _ids(tokenizer: Any, text: str, i: int) -> list[int]:
    if i % 8:
        return list(tokenizer.encode(text)[: 3 + i // 2])
    turn = [{"role": "user", "content": text if i % 16 else text * 3}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)[:250])


def lengths(count: int) -> list[int]:
    return [LONG if i % LONG_EVERY == 0 else SHORT for i in range(count)]


Case = tuple[list[int], int, list[int]]  # a prompt, tokens to generate, those that `generate` gives


@pytest.fixture(scope="module")
def cases(model: LoadedModel, reference: Any) -> Callable[[int], list[Case]]:
    """Every n-th prompt with its answer; each is asked once."""
    asked = prompts(model)
    counts = lengths(len(asked))

    @cache
    def answer(number: int) -> list[int]:
        ids = asked[number]
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=counts[number],
                do_sample=False,
            )
        return list(out[0, len(ids) :].tolist())

    return lambda every: [(asked[n], counts[n], answer(n)) for n in range(0, len(asked), every)]


def excused(reference: Any, prompt: list[int], right: list[int], got: list[int]) -> bool:
    """Whether the first difference lies where the two best logits nearly tie."""
    at = next(i for i in range(min(len(right), len(got))) if right[i] != got[i])
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + right[:at]]), logits_to_keep=1).logits[0, -1]
    best = logits.topk(2).values
    return bool(best[0] - best[1] < NEAR_TIE)


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.prove)], ids=["4 prompts", "64 prompts"])
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "alone"])
def test_greedy_equals_generate(
    model: LoadedModel, reference: Any, cases: Callable[[int], list[Case]], batched: bool, reuse: bool, every: int
) -> None:
    config = EngineConfig(
        pool_bytes=400 << 20, block_size=16, prefix_reuse=reuse, debug_nan_fill=True, max_batch_tokens=256
    )
    engine = LocalEngine(model, config, time.monotonic)
    asked = cases(every)
    requests = [request(str(i), ids, count) for i, (ids, count, _) in enumerate(asked)]
    run = Answers(engine)
    for group in [requests] if batched else [[one] for one in requests]:
        run.run(*group)
    different = [i for i, (_, _, right) in enumerate(asked) if run.ids[str(i)] != right]
    print(f"differ: {different}; {engine.stats()}")
    assert len(different) <= 1
    assert all(excused(reference, asked[i][0], asked[i][2], run.ids[str(i)]) for i in different)
    assert (engine.stats().cached_tokens > 0) == reuse
