"""Chooses one token per row of logits. Knows no pages and no text.

Order, as vLLM's: repetition, presence and frequency penalties; logit_bias; grammar mask; temperature; min_p; top_k;
top_p. Each request draws from its own generator, one number a token, so a seed gives the same answer beside any batch
mates. Log-probabilities are those of the model, before any of this.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engines.contract import EngineError, Grammar, RequestRefused, Sampling

TOP_P_CANDIDATES = 512  # sorted first; the whole vocabulary only where these do not hold top_p


class TokenMask(Protocol):
    """What a grammar still allows. One a request; used by the engine's thread alone."""

    def apply(self, logits: Tensor) -> None:
        """Set the logits [vocab] (float32) of forbidden tokens to -inf, in place. EngineError: give the request up."""
        ...

    def accept(self, token_id: int) -> None:
        """That token was chosen. EngineError: give the request up."""
        ...

    @property
    def finished(self) -> bool:
        """Nothing may follow: the answer is complete."""
        ...


MaskFactory = Callable[[Grammar], TokenMask]


@dataclass(frozen=True, slots=True)
class Choice:
    """`top`: (id, log-probability), the most likely first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


@dataclass(slots=True)
class TokenChooser:
    """One request's sampling and what it has to remember between tokens."""

    sampling: Sampling
    rng: random.Random
    prompt: array[int]
    mask: TokenMask | None = None
    counts: dict[int, int] = field(default_factory=dict)  # of generated ids
    _seen: Tensor | None = None  # distinct prompt ids, for repetition_penalty

    @property
    def plain(self) -> bool:
        """The most likely token is the choice, and nothing else is asked for."""
        wanted = self.sampling
        return wanted.temperature == 0 and wanted.logprobs is None and not self._shaped

    @property
    def _shaped(self) -> bool:
        wanted = self.sampling
        return bool(
            wanted.presence_penalty
            or wanted.frequency_penalty
            or wanted.repetition_penalty != 1
            or wanted.logit_bias
            or self.mask is not None
        )

    def accept(self, token_id: int) -> None:
        self.counts[token_id] = self.counts.get(token_id, 0) + 1
        if self.mask is not None:
            self.mask.accept(token_id)

    def choose(self, logits: Tensor) -> Choice:
        """`logits` [vocab] float32, changed in place. ValueError when nothing may be chosen."""
        logprobs = torch.log_softmax(logits, -1) if self.sampling.logprobs is not None else None
        if self._shaped:
            self._shape(logits)
        if self.sampling.temperature == 0:
            best, index = logits.max(-1)
            if best == -torch.inf:
                raise ValueError("the grammar allows no token")
            chosen = int(index)
        else:
            chosen = draw(logits, self.sampling, self.rng.random())
        if logprobs is None:
            return Choice(chosen)
        values, ids = logprobs.topk(self.sampling.logprobs or 0)
        return Choice(chosen, float(logprobs[chosen]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def _shape(self, logits: Tensor) -> None:
        wanted = self.sampling
        if wanted.repetition_penalty != 1:
            if self._seen is None:
                distinct = np.unique(np.array(self.prompt, np.int64))
                self._seen = torch.from_numpy(distinct).to(logits.device)
            made = torch.tensor(list(self.counts), dtype=torch.int64, device=logits.device)
            seen = torch.unique(torch.cat((self._seen, made)))
            scores = logits[seen]
            rate = wanted.repetition_penalty
            logits[seen] = torch.where(scores < 0, scores * rate, scores / rate)
        if self.counts and (wanted.presence_penalty or wanted.frequency_penalty):
            ids = torch.tensor(list(self.counts), dtype=torch.int64, device=logits.device)
            often = torch.tensor(list(self.counts.values()), dtype=logits.dtype, device=logits.device)
            logits[ids] -= wanted.presence_penalty + wanted.frequency_penalty * often
        if wanted.logit_bias:
            biased = torch.tensor(list(wanted.logit_bias), dtype=torch.int64, device=logits.device)
            logits[biased] += torch.tensor(list(wanted.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        if self.mask is not None:
            self.mask.apply(logits)


def draw(logits: Tensor, sampling: Sampling, at: float) -> int:
    """The token at quantile `at` (0 <= at < 1) of the filtered distribution, its tokens sorted by likelihood."""
    size = logits.shape[0]
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    if not math.isfinite(float(probabilities.sum())):
        raise ValueError("the grammar allows no token")
    whole = sampling.top_p >= 1 and not sampling.top_k and not sampling.min_p
    if whole:  # unsorted is as good: no sort over the vocabulary
        order, ranked = None, probabilities
    else:
        candidates = min(size, sampling.top_k or max(TOP_P_CANDIDATES, 1))
        ranked, order = probabilities.topk(candidates)
        held = float(ranked.sum())
        if candidates < size and not sampling.top_k and (held < sampling.top_p or _reaches(ranked, sampling.min_p)):
            ranked, order = probabilities.sort(descending=True)
        if sampling.min_p:
            ranked = ranked[ranked >= sampling.min_p * ranked[0]]
        if sampling.top_p < 1:
            total = ranked.sum() if sampling.top_k or sampling.min_p else 1.0
            before = ranked.cumsum(-1) - ranked
            ranked = ranked[before < sampling.top_p * total]  # the first that reaches top_p is in
    sums = ranked.cumsum(-1)
    place = int(torch.searchsorted(sums, torch.tensor([at * float(sums[-1])], dtype=sums.dtype), right=True))
    place = min(place, int(ranked.nonzero()[-1]))
    return place if order is None else int(order[place])


def _reaches(ranked: Tensor, min_p: float) -> bool:
    """Whether tokens less likely than all of `ranked` might pass min_p (0 = off: top_p alone decides)."""
    return bool(min_p and ranked[-1] >= min_p * ranked[0])


class Board:
    """The logits of a step, [rows, vocab] float32; rows are chosen from once each, and changed in place."""

    @torch.inference_mode()  # the runner's logits were made in it
    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        best, ids = logits.max(-1) if len(logits) else (logits.new_empty(0), logits.new_empty(0, dtype=torch.int64))
        self._finite, self._greedy = torch.isfinite(best).tolist(), ids.tolist()

    def is_finite(self, row: int) -> bool:
        return bool(self._finite[row])

    @torch.inference_mode()
    def choose(self, row: int, chooser: TokenChooser) -> Choice | Failed:
        """A row that fails says why and harms no other."""
        if not self._finite[row]:
            return Failed("the model's logits are not finite")
        if chooser.plain:
            return Choice(self._greedy[row])
        return _choose_row(chooser, self._logits[row])


def choose(logits: Tensor, choosers: Seq[TokenChooser]) -> list[Choice | Failed]:
    """One choice per row of `logits` [rows, vocab] float32."""
    board = Board(logits)
    return [board.choose(row, chooser) for row, chooser in enumerate(choosers)]


def _choose_row(chooser: TokenChooser, logits: Tensor) -> Choice | Failed:
    try:
        return chooser.choose(logits)
    except (EngineError, ValueError, RuntimeError) as error:
        return Failed(str(error))


def refuse_sampling(sampling: Sampling, *, vocab_size: int, max_logprobs: int, grammars: bool) -> None:
    """Raise RequestRefused, naming the field, for a value that means nothing here."""
    rules: tuple[tuple[str, bool, str], ...] = (
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("temperature", 0 <= sampling.temperature <= 100, "0 to 100"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0, at most 1"),
        ("top_k", sampling.top_k >= 0, "at least 0 (0 = off)"),
        ("min_p", 0 <= sampling.min_p <= 1, "0 to 1"),
        ("presence_penalty", -2 <= sampling.presence_penalty <= 2, "-2 to 2"),
        ("frequency_penalty", -2 <= sampling.frequency_penalty <= 2, "-2 to 2"),
        ("repetition_penalty", 0 < sampling.repetition_penalty <= 100, "above 0, at most 100"),
        ("stop", all(sampling.stop), "strings that are not empty"),
        ("logprobs", 0 <= (sampling.logprobs or 0) <= max_logprobs, f"0 to {max_logprobs}"),
        ("logit_bias", all(0 <= i < vocab_size for i in sampling.logit_bias), f"token ids below {vocab_size}"),
        ("logit_bias", all(-100 <= value <= 100 for value in sampling.logit_bias.values()), "biases from -100 to 100"),
        ("stop_token_ids", all(0 <= i < vocab_size for i in sampling.stop_token_ids), f"ids below {vocab_size}"),
    )
    for name, holds, wanted in rules:
        if not holds:
            raise RequestRefused(f"{name} is {getattr(sampling, name)!r}, must be {wanted}", param=name)
    if sampling.grammar is not None and not grammars:
        raise RequestRefused("this engine constrains no output: it runs without a grammar library", param="grammar")
