"""Choosing a token from logits: filters, penalties, seeds, log-probabilities, masks, failures."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter

import torch

from engines.contract import Grammar, RequestRefused, Sampling
from engines.local.engine import LocalEngine
from engines.local.sampler import Choice, Failed, TokenChooser, choose, draw
from tests.engines.local.tiny import Answers, request, tiny_engine, tiny_loaded


def chooser(prompt: list[int] | None = None, **values: object) -> TokenChooser:
    wanted = Sampling(**({"max_tokens": 8} | values))  # type: ignore[arg-type]
    return TokenChooser(wanted, random.Random(0), array("I", prompt or []))


def logits(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def drawn(scores: torch.Tensor, **values: object) -> Counter[int]:
    """What 200 even quantiles choose."""
    sampling = Sampling(max_tokens=1, **values)  # type: ignore[arg-type]
    return Counter(draw(scores.clone(), sampling, (i + 0.5) / 200) for i in range(200))


HALVES = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))


def test_quantiles_follow_the_distribution() -> None:
    assert drawn(HALVES) == Counter({0: 100, 1: 50, 2: 30, 3: 20})


def test_top_k_top_p_and_min_p_cut_the_tail() -> None:
    assert set(drawn(HALVES, top_k=2)) == {0, 1}
    assert set(drawn(HALVES, top_p=0.5)) == {0}
    assert set(drawn(HALVES, top_p=0.76)) == {0, 1, 2}
    assert set(drawn(HALVES, min_p=0.28)) == {0, 1, 2}
    assert drawn(HALVES, top_k=2) == Counter({0: 133, 1: 67})


def test_top_p_finds_its_set_in_a_large_flat_vocabulary() -> None:
    flat = torch.zeros(5000)
    assert max(drawn(flat, top_p=0.9)) > 512


def test_a_low_temperature_is_nearly_greedy() -> None:
    assert set(drawn(HALVES, temperature=0.01)) == {0}


def test_penalties_and_bias_move_the_choice() -> None:
    scores = logits(2.0, 1.9, 0.0)
    one = chooser(temperature=0.0, presence_penalty=0.5)
    assert one.choose(scores.clone()).id == 0
    one.accept(0)
    assert one.choose(scores.clone()).id == 1
    assert chooser([0], temperature=0.0, repetition_penalty=2.0).choose(scores.clone()).id == 1
    assert chooser(temperature=0.0, logit_bias={2: 100.0}).choose(scores.clone()).id == 2
    often = chooser(temperature=0.0, frequency_penalty=0.06)
    often.accept(0)
    assert often.choose(scores.clone()).id == 0
    often.accept(0)
    assert often.choose(scores.clone()).id == 1


def test_logprobs_are_the_models_own_most_likely_first() -> None:
    choice = chooser(temperature=0.0, logprobs=2, logit_bias={2: 100.0}).choose(HALVES.clone())
    assert choice.id == 2
    assert choice.logprob is not None
    assert math.isclose(choice.logprob, math.log(0.15), rel_tol=1e-5)
    assert [token for token, _ in choice.top] == [0, 1]


def test_a_row_that_is_not_finite_fails_alone() -> None:
    rows = torch.stack((logits(1.0, math.nan), logits(0.0, 3.0)))
    assert choose(rows, [chooser(temperature=0.0), chooser(temperature=0.0)]) == [
        Failed("the model's logits are not finite"),
        Choice(1),
    ]


def test_a_seed_gives_the_same_answer_beside_any_batch_mates() -> None:
    wanted = {"temperature": 1.0, "seed": 7, "top_p": 0.9}
    alone = Answers(tiny_engine()).run(request("a", [1, 2, 3], 20, **wanted))
    mates = [request(f"m{n}", [n] * (n + 1), 15, temperature=1.0) for n in range(5)]
    among = Answers(tiny_engine()).run(*mates, request("a", [1, 2, 3], 20, **wanted))
    other = Answers(tiny_engine()).run(request("a", [1, 2, 3], 20, **(wanted | {"seed": 8})))
    assert alone.ids["a"] == among.ids["a"] != other.ids["a"]


class OnlyThese:
    """A mask that allows a list of tokens, in order, then is finished; refuses at `gives_up`."""

    def __init__(self, allowed: list[int], gives_up: int | None = None) -> None:
        self._allowed, self._at, self._gives_up = allowed, 0, gives_up

    def apply(self, scores: torch.Tensor) -> None:
        if self._at == self._gives_up:
            raise RequestRefused("too large", param="grammar")
        keep = scores[self._allowed[self._at]].clone()
        scores.fill_(-torch.inf)
        scores[self._allowed[self._at]] = keep

    def accept(self, token_id: int) -> None:
        assert token_id == self._allowed[self._at]
        self._at += 1

    @property
    def finished(self) -> bool:
        return self._at == len(self._allowed)


def masked(mask: OnlyThese) -> LocalEngine:
    plain = tiny_engine()
    return LocalEngine(tiny_loaded(), plain.config, plain.clock, lambda grammar: mask)


def test_a_grammar_constrains_and_ends_the_answer() -> None:
    for temperature in (0.0, 1.0):
        grammar = Grammar("regex", "x")
        run = Answers(masked(OnlyThese([5, 9, 5]))).run(request("a", [1], grammar=grammar, temperature=temperature))
        assert run.ids["a"] == [5, 9, 5]
        assert run.last["a"].finish == "stop"


def test_a_grammar_that_gives_up_fails_its_own_request() -> None:
    engine = masked(OnlyThese([5, 9, 5], gives_up=1))
    run = Answers(engine).run(request("a", [1], grammar=Grammar("regex", "x")), request("b", [1, 2], 4))
    assert run.last["a"].error == "too large"
    assert len(run.ids["b"]) == 4
