"""The engine's logic on a tiny model whose right answers are known: batching, preemption, failures, cancelling.

Every step of every test runs the engine's own check of all invariants (tests/engines/local/tiny.py, Answers.step).
"""

from __future__ import annotations

import random

import pytest

from engines.contract import ContextOverflow, EngineOverloaded, Grammar, RequestRefused
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


def test_another_salt_shares_nothing() -> None:
    engine, prompt = tiny_engine(), ids(1, 32)
    run = Answers(engine).run(request("a", prompt, salt="one"))
    run.run(request("b", prompt, salt="two"), request("c", prompt, salt="one"))
    assert (run.cached["b"], run.cached["c"]) == (0, 24)
    assert run.ids["b"] == run.ids["c"]


def test_without_prefix_reuse_everything_is_computed_again() -> None:
    engine, prompt = tiny_engine(prefix_reuse=False), ids(1, 32)
    run = Answers(engine).run(request("a", prompt)).run(request("b", prompt))
    assert run.cached == {"a": 0, "b": 0}
    assert run.ids["b"] == TINY.greedy(prompt, 8)


def test_two_requests_with_one_prefix_compute_it_once() -> None:
    engine, shared = tiny_engine(max_batch_tokens=16, max_running=4), ids(2, 48)
    run = Answers(engine).run(request("a", [*shared, 1, 2]), request("b", [*shared, 3, 4]))
    assert run.ids == {"a": TINY.greedy([*shared, 1, 2], 8), "b": TINY.greedy([*shared, 3, 4], 8)}
    assert run.cached == {"a": 0, "b": 48}


def test_a_small_pool_preempts_and_still_answers_all_rightly() -> None:
    engine = tiny_engine(pages=12)
    prompts = {str(n): ids(n, 10 + n) for n in range(4)}
    run = Answers(engine).run(*(request(k, v, 40) for k, v in prompts.items()))
    assert run.ids == {key: TINY.greedy(prompt, 40) for key, prompt in prompts.items()}
    assert engine.stats().preemptions > 0
    assert run.last["0"].usage is not None
    assert run.last["0"].usage.output_tokens == 40


def test_a_preempted_request_finds_its_published_pages_again() -> None:
    engine = tiny_engine(pages=16)
    run = Answers(engine)
    engine.submit(request("late", ids(1, 64), 8, priority=1))
    for _ in range(3):
        run.step()
    engine.submit(request("urgent", ids(2, 56), 4, priority=0))
    while engine.has_work():
        run.step()
    assert [output.request_id for output in run.outputs if output.finish] == ["urgent", "late"]
    assert run.ids == {"late": TINY.greedy(ids(1, 64), 8), "urgent": TINY.greedy(ids(2, 56), 4)}
    assert engine.stats().preemptions == 1
    assert engine.stats().prefill_tokens < 64 + 56 + 64


def test_priority_runs_first_and_equals_in_order_of_arrival() -> None:
    engine = tiny_engine(max_running=1)
    run = Answers(engine)
    for name, priority in (("c", 5), ("a", 0), ("d", 5), ("b", 0)):
        engine.submit(request(name, ids(3, 5), 2, priority=priority))
    while engine.has_work():
        run.step()
    assert [output.request_id for output in run.outputs if output.finish] == ["a", "b", "c", "d"]


def test_decoding_goes_on_while_a_long_prompt_is_prefilled_in_chunks() -> None:
    engine = tiny_engine(max_batch_tokens=16, max_running=4)
    run = Answers(engine)
    engine.submit(request("talking", ids(1, 4), 30))
    run.step()
    engine.submit(request("long", ids(2, 100), 4))
    before = len(run.ids["talking"])
    steps = 0
    while "long" not in run.ids or not run.ids["long"]:
        run.step()
        steps += 1
    assert steps >= 100 // 16
    assert len(run.ids["talking"]) - before >= steps
    while engine.has_work():
        run.step()
    assert run.ids == {"talking": TINY.greedy(ids(1, 4), 30), "long": TINY.greedy(ids(2, 100), 4)}


def test_started_comes_once_before_the_first_id() -> None:
    engine = tiny_engine(max_batch_tokens=8, max_running=2)
    run = Answers(engine).run(request("a", ids(1, 30), 3))
    assert [output.started is not None for output in run.outputs].count(True) == 1
    assert run.outputs[0].started is not None
    assert run.outputs[0].started.prompt_tokens == 30


@pytest.mark.parametrize("after_steps", [0, 1, 2, 5])
def test_cancel_at_any_point_frees_everything(after_steps: int) -> None:
    engine = tiny_engine(max_batch_tokens=16, max_running=4)
    run = Answers(engine)
    engine.submit(request("a", ids(1, 40), 50))
    engine.submit(request("b", ids(2, 9), 5))
    for _ in range(after_steps):
        run.step()
    engine.abort("a")
    engine.check()
    while engine.has_work():
        run.step()
    assert run.last["a"].finish == "cancelled"
    assert run.last["a"].usage is not None
    assert run.ids["b"] == TINY.greedy(ids(2, 9), 5)
    assert engine.stats().blocks_used == 0
    engine.abort("a")
    assert not engine.has_work()


def test_a_request_with_nan_fails_alone_and_leaves_no_nan_behind() -> None:
    module = TinyModel()
    module.poison = 7
    clean = [i for i in range(VOCAB) if i != 7]
    prompt = random.Random(1).choices(clean, k=20)
    engine = tiny_engine(pages=10, module=module, debug_nan_fill=False)
    run = Answers(engine).run(request("bad", [1, 7, 2], 4), request("good", prompt, 3))
    assert run.last["bad"].error == "the model's logits are not finite"
    right = TINY.greedy(prompt, 3)
    assert 7 not in right
    assert run.ids["good"] == right
    for n in range(6):  # the pages of the bad one come round again
        assert run.run(request(f"next{n}", prompt[n:], 2)).last[f"next{n}"].error is None


def test_a_forward_that_raises_fails_only_the_request_that_causes_it() -> None:
    module = TinyModel()
    module.break_on = 63
    good = [i % 60 for i in ids(5, 20)]
    run = Answers(tiny_engine(module=module)).run(request("bad", [1, 63, 2], 4), request("good", good, 3))
    assert "this token breaks the model" in (run.last["bad"].error or "")
    assert run.ids["good"] == TINY.greedy(good, 3)


def test_stop_token_ids_end_the_answer_and_stay_out_of_the_text() -> None:
    prompt = ids(0, 21)
    right = TINY.greedy(prompt, 30)
    stop = right[6]
    at = right.index(stop)
    run = Answers(tiny_engine()).run(request("a", prompt, 30, stop_token_ids=(stop,)))
    assert run.ids["a"] == right[: at + 1]
    assert run.text["a"] == "".join(chr(ord("0") + i) for i in right[:at])
    assert (run.last["a"].finish, run.last["a"].stop) == ("stop", None)


def test_a_stop_string_over_two_tokens_is_never_sent() -> None:
    prompt = ids(0, 21)
    text = "".join(chr(ord("0") + i) for i in TINY.greedy(prompt, 30))
    stop = text[8:11]
    run = Answers(tiny_engine()).run(request("a", prompt, 30, stop=(stop, "never")))
    assert run.text["a"] == text[: text.index(stop)]
    assert (run.last["a"].finish, run.last["a"].stop) == ("stop", stop)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: request("x", []), RequestRefused),
        (lambda: request("x", [1, VOCAB]), RequestRefused),
        (lambda: request("x", [1], 0), RequestRefused),
        (lambda: request("x", [1], temperature=float("nan")), RequestRefused),
        (lambda: request("x", [1], top_p=0.0), RequestRefused),
        (lambda: request("x", [1], logit_bias={VOCAB: 1.0}), RequestRefused),
        (lambda: request("x", [1], grammar=Grammar("json_object")), RequestRefused),
        (lambda: request("x", [1], logprobs=21), RequestRefused),
        (lambda: request("x", ids(1, 100), 29), ContextOverflow),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(make: object, error: type[Exception]) -> None:
    engine = tiny_engine(window=128)
    with pytest.raises(error):
        engine.submit(make())  # type: ignore[operator]
    assert not engine.has_work()


def test_an_overflow_tells_both_numbers() -> None:
    with pytest.raises(ContextOverflow) as refused:
        tiny_engine(pages=4).submit(request("x", ids(1, 30), 3))
    assert (refused.value.limit, refused.value.requested) == (32, 33)


def test_a_full_queue_refuses() -> None:
    engine = tiny_engine(max_waiting=1)
    engine.submit(request("a", [1]))
    with pytest.raises(EngineOverloaded):
        engine.submit(request("b", [1]))


def test_a_prompt_as_large_as_the_pool_runs() -> None:
    engine = tiny_engine(pages=4)
    prompt = ids(1, 28)
    run = Answers(engine).run(request("a", prompt, 4)).run(request("b", ids(2, 28), 4)).run(request("c", prompt, 4))
    assert run.ids["c"] == TINY.greedy(prompt, 4)
