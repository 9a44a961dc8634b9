"""What the real model can still answer from a kept context: forced choice by log-likelihood.

A question is asked after the context; the right value and three others of its kind are each scored as the answer's
text. From each score its score without any context is taken away, so that a value of merely likely words wins nothing.
One forward pass reads the context, one more for each question, on a copy of its cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from bench.compaction.context import Context, Sizer
from bench.compaction.generate import Fact
from engines.local.model_process import WAIT_POLICY
from gateway.sessions.tokens import ModelTokens
from gateway.sessions.vocabulary import unpack_ids

HINT = " Answer with the value only."


class Reader:
    """`transformers` on the model, float32. `longest`: of a context, tokens."""

    def __init__(self, model: Path, tokens: ModelTokens, threads: int | None) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", WAIT_POLICY)  # before torch comes in
        import torch
        from transformers import AutoModelForCausalLM

        if threads:
            torch.set_num_threads(threads)
        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        takes = signature(type(self.model).forward).parameters
        self._cache_word = "cache" if "cache" in takes else "past_key_values"  # its name before transformers 5.24
        self.tokens = tokens
        self.longest = tokens.window - 256
        self._alone: dict[tuple[str, str], list[float]] = {}

    def right(self, sizer: Sizer, context: Context, facts: Sequence[Fact]) -> list[bool]:
        """For each fact, whether its value is preferred to the others."""
        given = self._scores(sizer, context, facts)
        alone = self._without(sizer, facts)
        return [
            all(mine > other for other in others)
            for one, none in zip(given, alone, strict=True)
            for mine, *others in [[with_ - without for with_, without in zip(one, none, strict=True)]]
        ]

    def _without(self, sizer: Sizer, facts: Sequence[Fact]) -> list[list[float]]:
        missing = [fact for fact in facts if (fact.ask, fact.value) not in self._alone]
        if missing:
            for fact, scores in zip(missing, self._scores(sizer, sizer.context(()), missing), strict=True):
                self._alone[fact.ask, fact.value] = scores
        return [self._alone[fact.ask, fact.value] for fact in facts]

    def _scores(self, sizer: Sizer, context: Context, facts: Sequence[Fact]) -> list[list[float]]:
        """Log-likelihoods of each fact's value and its choices."""
        torch = self.torch
        prompts = [self._ids(sizer.prompt(context, {"role": "user", "content": fact.ask + HINT})) for fact in facts]
        shared = _shared(prompts) if len(prompts) > 1 else len(prompts[0]) - 1
        from transformers import DynamicCache

        scores: list[list[float]] = []
        with torch.inference_mode():
            cache = DynamicCache(config=self.model.config)
            read = torch.tensor([prompts[0][:shared]])
            self.model(read, **{self._cache_word: cache}, use_cache=True, logits_to_keep=1)
            width = 1 + len(facts[0].choices)
            cache.batch_repeat_interleave(width)
            for fact, prompt in zip(facts, prompts, strict=True):
                answers = [self.tokens.vocabulary.encode_text(text) for text in (fact.value, *fact.choices)]
                scores.append(self._scored(cache, prompt[shared:], answers))
                cache.crop(shared - cache.get_seq_length())
        return scores

    def _scored(self, cache: Any, asked: list[int], answers: Sequence[Sequence[int]]) -> list[float]:
        torch = self.torch
        longest = max(map(len, answers))
        rows = torch.tensor([[*asked, *answer, *[0] * (longest - len(answer))] for answer in answers])
        logits = self.model(rows, **{self._cache_word: cache}, use_cache=True, logits_to_keep=longest + 1).logits
        likely = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        return [
            sum(float(likely[row, at, token]) for at, token in enumerate(answer)) for row, answer in enumerate(answers)
        ]

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(unpack_ids(self.tokens.render(messages)))


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all begin with, one at least left of each."""
    least = min(map(len, prompts)) - 1
    return next((at for at in range(least) if len({prompt[at] for prompt in prompts}) > 1), least)
