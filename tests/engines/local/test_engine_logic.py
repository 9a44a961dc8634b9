"""The engine's logic on a tiny model whose right answers are known: pages, sessions, preemption, failures."""

from __future__ import annotations

import random

from tests.engines.local.tiny import VOCAB, Answers, TinyModel, request, tiny_engine

TINY = TinyModel()


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def test_one_request_gets_the_plain_answer() -> None:
    prompt = ids(0, 21)
    run = Answers(tiny_engine()).run(request("a", prompt, 30))
    assert run.ids["a"] == TINY.greedy(prompt, 30)
    assert run.last["a"].finish == "length"
    assert run.text["a"] == "".join(chr(ord("0") + i) for i in run.ids["a"])


def test_batch_mates_do_not_change_an_answer() -> None:
    prompts = {str(n): ids(n, n) for n in (1, 2, 7, 8, 9, 16, 40, 63)}
    run = Answers(tiny_engine(max_batch_tokens=24, max_running=5)).run(*(request(k, v, 12) for k, v in prompts.items()))
    assert run.ids == {key: TINY.greedy(prompt, 12) for key, prompt in prompts.items()}


def test_a_second_run_reuses_all_full_blocks_but_the_last_token() -> None:
    engine, prompt = tiny_engine(), ids(1, 32)
    first = Answers(engine).run(request("a", prompt))
    second = Answers(engine).run(request("b", prompt))
    assert second.ids["b"] == first.ids["a"] == TINY.greedy(prompt, 8)
    assert (first.cached["a"], second.cached["b"]) == (0, 24)
