"""Guessed tokens change how fast an answer comes and nothing else: neither ids nor text, nor what stays in the pool."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.contract import EMPTY_DIGEST, Base, Grammar, Usage, chain_digest
from engines.local.engine import CoreRequest, LocalEngine
from engines.local.speculate import MOST, Acceptance, draft_length, lookup
from tests.engines.local.test_continue import Odd
from tests.engines.local.tiny import VOCAB, Answers, TinyModel, request, tiny_engine

NOTHING = Usage(0, 0)
Guess = Callable[["array[int]", int], "array[int]"]


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def knowing(wholes: list[list[int]], *, wrong: float, seed: int = 0) -> Guess:
    """A guess that knows the answers, and errs at a share of its tokens."""
    draw = random.Random(seed)

    def guess(tokens: array[int], most: int) -> array[int]:
        path = tokens.tolist()
        after = next((whole[len(path) :] for whole in wholes if whole[: len(path)] == path), [])
        right = (after + [draw.randrange(VOCAB) for _ in range(MOST)])[: max(most, 0)]
        return array("I", [(token + 1) % VOCAB if draw.random() < wrong else token for token in right])

    return guess


def engine(guess: Guess | None, **settings: Any) -> LocalEngine:
    made = tiny_engine(speculate="off", **settings)
    made.mask_factory = Odd
    made._scheduler.guess = guess
    return made


def both(requests: list[CoreRequest], *, wrong: float = 0.25, **settings: Any) -> tuple[Answers, Answers]:
    """The same without guesses and with."""
    plain = Answers(engine(None, **settings)).run(*requests)
    wholes = [list(array("I", one.delta)) + plain.ids[one.request_id] for one in requests]
    fast = Answers(engine(knowing(wholes, wrong=wrong), **settings)).run(*requests)
    return plain, fast


def same(plain: Answers, fast: Answers) -> None:
    assert fast.ids == plain.ids
    assert fast.text == plain.text
    for name, one in plain.last.items():
        other = fast.last[name]
        assert (other.finish, other.stop, other.error) == (one.finish, one.stop, one.error)
        assert replace(other.usage or NOTHING, cached_tokens=0) == replace(one.usage or NOTHING, cached_tokens=0)


@pytest.mark.parametrize("wrong", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 8},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.8},
        {"logit_bias": {3: 4.0}},
        {"grammar": Grammar("regex", "odd")},
        {"temperature": 1.2, "seed": 9, "grammar": Grammar("regex", "odd"), "logprobs": 2},
    ],
    ids=lambda sampling: ",".join(sampling) or "greedy",
)
def test_the_answer_is_the_one_that_would_have_come_without(sampling: dict[str, Any], wrong: float) -> None:
    asked = [request(str(n), ids(n, 20 + 7 * n), 30, **sampling) for n in range(2)]
    plain, fast = both(asked, wrong=wrong)
    same(plain, fast)
    stats = fast.engine.stats()
    assert stats.drafted_tokens > 0
    assert (stats.accepted_tokens > 0) == (wrong < 1)
    assert stats.decode_tokens == plain.engine.stats().decode_tokens
    if wrong == 0:
        assert stats.steps < plain.engine.stats().steps / 2


def test_log_probabilities_come_with_every_token() -> None:
    plain, fast = both([request("a", ids(1, 30), 20, logprobs=3)], wrong=0.2)
    told = [[one for output in run.outputs for one in output.logprobs] for run in (plain, fast)]
    assert [(one.id, [entry[0] for entry in one.top]) for one in told[1]] == [
        (one.id, [entry[0] for entry in one.top]) for one in told[0]
    ]
    assert all(abs(a.logprob - b.logprob) < 1e-5 for a, b in zip(*told, strict=True))


def test_a_stop_amid_a_draft_ends_the_answer_there() -> None:
    prompt = ids(2, 30)
    whole = Answers(engine(None)).run(request("a", prompt, 24)).ids["a"]
    for at in (5, 6, 7, 8):
        first = whole.index(whole[at])
        plain, fast = both([request("a", prompt, 24, stop_token_ids=(whole[at],))], wrong=0.0)
        same(plain, fast)
        assert len(fast.ids["a"]) == first + 1
        spelt = "".join(chr(ord("0") + token) for token in whole[at : at + 3])
        same(*both([request("a", prompt, 24, stop=(spelt,))], wrong=0.0))


def test_no_draft_goes_beyond_max_tokens() -> None:
    for most in (1, 2, 3, 5, 9):
        plain, fast = both([request("a", ids(3, 12), most)], wrong=0.0)
        same(plain, fast)
        assert len(fast.ids["a"]) == most


def test_a_model_that_breaks_amid_a_draft_fails_where_it_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    module = TinyModel()
    prompt = ids(4, 20)
    whole = module.greedy(prompt, 16)
    module.poison = next(token for token in whole[6:] if token not in prompt and token not in whole[:6])
    runs = []
    for guess in (None, knowing([prompt + whole], wrong=0.0)):
        made = engine(guess, module=module)
        runs.append(Answers(made).run(request("a", prompt, 16), request("b", ids(5, 9), 4)))
    plain, fast = runs
    assert fast.last["a"].error == plain.last["a"].error == "the model's logits are not finite"
    assert fast.ids == plain.ids
    assert fast.ids["a"][-1] == module.poison


def test_pages_that_run_out_preempt_nobody_for_a_draft() -> None:
    asked = [request(str(n), ids(n, 30), 40) for n in range(3)]
    for pages in (14, 16, 20):
        plain, fast = both(asked, wrong=0.3, pages=pages)
        same(plain, fast)
        assert fast.engine.stats().preemptions <= plain.engine.stats().preemptions + 1


def test_an_abort_amid_drafts_leaves_only_what_was_accepted() -> None:
    prompt = ids(6, 24)
    whole = prompt + TinyModel().greedy(prompt, 40)
    run = Answers(engine(knowing([whole], wrong=0.4)))
    run.engine.submit(request("a", prompt, 40, session="s"))
    for _ in range(6):
        run.step()
    run.engine.abort("a")
    run.run()
    assert run.ids["a"] == whole[24 : 24 + len(run.ids["a"])]
    assert run.engine.sessions()[0].tokens == 24 + len(run.ids["a"])


@pytest.mark.parametrize("wrong", [0.1, 0.5, 1.0])
def test_what_was_rejected_is_never_read_again(wrong: float) -> None:
    """Turns of a session on its kept path, and the same prompts in other sessions over published blocks."""
    module = TinyModel()
    wholes: list[list[int]] = []
    run = Answers(engine(knowing(wholes, wrong=wrong, seed=3), module=module))
    path, base = ids(7, 21), None
    digest, sent = EMPTY_DIGEST, path
    for turn in range(4):
        answer = module.greedy(path, 13)
        wholes.append(path + answer)
        run.run(request(f"s{turn}", sent, 13, session="s", base=base), request(f"o{turn}", path, 13))
        assert run.ids[f"s{turn}"] == run.ids[f"o{turn}"] == answer
        digest = chain_digest(chain_digest(digest, array("I", sent).tobytes()), array("I", answer).tobytes())
        sent = ids(70 + turn, 6)
        base = Base(len(path) + 13, digest)
        path = path + answer + sent
    assert run.engine.stats().cached_tokens > 0


def test_background_work_is_guessed_within_its_chunk() -> None:
    prompt = ids(8, 40)
    whole = prompt + TinyModel().greedy(prompt, 30)
    run = Answers(engine(knowing([whole], wrong=0.0), background_chunk=4))
    run.run(replace(request("a", prompt, 30), priority=1))
    assert run.ids["a"] == whole[40:]


def test_guessing_stops_where_it_is_always_wrong_and_is_tried_again() -> None:
    acceptance = Acceptance()
    drafts = []
    for _ in range(100):
        length = draft_length(acceptance.rate, 1)
        drafts.append(length)
        if length:
            acceptance.note(length, 0)
        else:
            acceptance.rest()
    assert sum(drafts) < 20
    assert drafts[-1] == 0 or any(drafts[50:])
    assert any(drafts[20:])


def test_guessing_grows_where_it_is_right() -> None:
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.note(length := draft_length(acceptance.rate, 1), length)
    assert draft_length(acceptance.rate, 1) == MOST


@given(st.floats(0.0, 1.0), st.integers(1, 64))
def test_a_draft_is_never_longer_beside_more_or_after_less(rate: float, batch: int) -> None:
    length = draft_length(rate, batch)
    assert 0 <= length <= MOST
    assert draft_length(rate, batch + 1) <= length
    assert draft_length(rate * 0.9, batch) <= length


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(0, 8))
def test_lookup_gives_what_followed_the_longest_end(path: list[int], most: int) -> None:
    got = lookup(array("I", path), most).tolist()
    expected: list[int] = []
    for same_ids in (4, 3, 2):
        end = path[len(path) - same_ids :]
        places = [i for i in range(len(path) - same_ids) if path[i : i + same_ids] == end] if len(path) > 2 else []
        if places and most > 0 and len(path) > same_ids:
            whole = [i for i in places if len(path) - i - same_ids >= most]
            at = (whole[-1] if whole else places[0]) + same_ids
            expected = path[at : at + most]
            break
    assert got == expected


def test_the_engine_guesses_from_the_path_where_it_is_told_to() -> None:
    prompt = ids(9, 12) * 3
    for speculate, guessed in (("lookup", True), ("off", False), ("auto", False)):
        run = Answers(tiny_engine(speculate=speculate)).run(request("a", prompt, 40, logit_bias={prompt[0]: 100.0}))
        assert run.ids["a"] == [prompt[0]] * 40
        assert (run.engine.stats().accepted_tokens > 0) == guessed
