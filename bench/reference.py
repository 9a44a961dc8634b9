"""transformers' own `generate` beside the engine: the same ids, greedy, float32, on the same machine.

fresh   a new DynamicCache each turn: what a stateless server does
kept    one DynamicCache over the whole conversation: the most that transformers itself can reuse
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

NEAR_TIE = 1e-4  # two best logits closer than this may change places with the order of a sum


class _Stamps(BaseStreamer):
    """When each token came; the first call is the prompt's."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Generated:
    ttft_s: float
    decode_s: float  # from the first token to the last
    cpu_s: float  # to the end
    ids: tuple[int, ...]


class Reference:
    """The model of `folder` in this process; `threads` None: torch's choice; `attention`: transformers' name of one."""

    def __init__(self, folder: Path, threads: int | None, attention: str = "sdpa") -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.threads = torch.get_num_threads()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention
        )
        self._model.eval()
        self._model.generation_config.eos_token_id = None  # replies of a given length, as `ignore_eos` of the engine
        self._cache = DynamicCache(config=self._model.config)
        takes = signature(type(self._model).forward).parameters
        self._cache_word = "cache" if "cache" in takes else "past_key_values"  # its name before transformers 5.24
        self._held: list[int] = []  # ids whose keys and values are in the cache

    def fresh(self, prompt: list[int]) -> Generated:
        """The first token only: all that a new cache changes."""
        return self._generate(prompt, 1, None)

    def kept(self, prompt: list[int], count: int) -> Generated:
        """Goes on in the cache of the turns before, from where `prompt` leaves what it holds."""
        common = next((i for i, (a, b) in enumerate(zip(self._held, prompt, strict=False)) if a != b), len(self._held))
        if common < len(self._held):
            self._cache.crop(common)
        made = self._generate(prompt, count, self._cache)
        self._held = [*prompt, *made.ids][:-1]  # the last token is not run any more
        return made

    def forget(self) -> None:
        self._cache, self._held = DynamicCache(config=self._model.config), []

    @torch.inference_mode()
    def gap(self, ids: list[int]) -> float:
        """Between the two best logits after `ids`."""
        best = self._model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].topk(2).values
        return float(best[0] - best[1])

    @torch.inference_mode()
    def _generate(self, prompt: list[int], count: int, cache: DynamicCache | None) -> Generated:
        stamps = _Stamps()
        ids = torch.tensor([prompt])
        more = {} if cache is None else {self._cache_word: cache}
        start, cpu = time.perf_counter(), time.process_time()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            streamer=stamps,
            **more,
        )
        cpu = time.process_time() - cpu
        first, last = stamps.times[1], stamps.times[-1]
        return Generated(first - start, last - first, cpu, tuple(out[0, len(prompt) :].tolist()))
