"""An answer that another engine began: taken up after any of its ids, it is the one that was never interrupted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from engines.contract import EMPTY_DIGEST, Base, Generated, Grammar, RequestRefused, Usage, chain_digest
from engines.local.engine import CoreRequest, LocalEngine
from engines.local.sequence import CoreRequest as Request
from tests.engines.local.tiny import VOCAB, Answers, TinyModel, request, tiny_engine

TINY = TinyModel()
PROMPT = random.Random(5).choices(range(VOCAB), k=37)


def packed(ids: list[int]) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def begun(asked: CoreRequest, ids: list[int], chars: int) -> CoreRequest:
    return replace(asked, request_id="b", delta=asked.delta + packed(ids), generated=Generated(len(ids), chars))


def engine() -> LocalEngine:
    made = tiny_engine(seed=3)
    made.mask_factory = Odd
    return made


class Odd:
    """A grammar that allows an odd id after an even number of ids and an even one after an odd, 24 in all."""

    def __init__(self, grammar: Grammar) -> None:
        self.seen = 0

    def apply(self, scores: Tensor) -> None:
        scores[self.seen % 2 :: 2] = float("-inf")

    def accept(self, token_id: int) -> None:
        assert token_id % 2 != self.seen % 2
        self.seen += 1

    @property
    def finished(self) -> bool:
        return self.seen == 24


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.8},
        {"temperature": 0.9, "seed": 11, "top_p": 0.9},
        {"grammar": Grammar("regex", "odd")},
        {"stop": ("A",)},
        {"logprobs": 2},
    ],
    ids=lambda sampling: "-".join(sampling) or "greedy",
)
def test_after_any_of_its_ids_it_goes_on_as_if_it_had_never_moved(sampling: dict[str, Any]) -> None:
    asked = request("a", PROMPT, 30, session="s", **sampling)
    first = Answers(engine()).run(asked)
    outputs = [output for output in first.outputs if output.ids]
    ids, text = first.ids["a"], first.text["a"]
    for k in (*range(1, len(ids), 5), len(ids) - 1):
        told = "".join(output.text for output in outputs[:k])
        rest = Answers(engine()).run(begun(asked, ids[:k], len(told)))
        assert rest.ids["b"] == ids[k:]
        assert told + rest.text["b"] == text
        assert (rest.last["b"].finish, rest.last["b"].stop) == (first.last["a"].finish, first.last["a"].stop)
        assert rest.last["b"].usage == first.last["a"].usage == Usage(len(PROMPT), len(ids), 0, prefix_bits=16)
        logprobs = [(p.id, round(p.logprob, 4)) for output in outputs[k:] for p in output.logprobs]
        assert [(p.id, round(p.logprob, 4)) for o in rest.outputs for p in o.logprobs] == logprobs


def test_the_sessions_next_turn_finds_the_marks_of_prompt_and_answer() -> None:
    asked = request("a", PROMPT, 12, session="s", salt="t")
    ids = TINY.greedy(PROMPT, 12)
    run = Answers(engine()).run(begun(asked, ids[:5], 5))
    marks = chain_digest(EMPTY_DIGEST, asked.delta)
    end = Base(len(PROMPT) + 12, chain_digest(marks, packed(ids)))
    run.run(request("c", [1, 2], session="s", salt="t", base=end))
    run.run(request("d", [1], session="s", salt="t", base=Base(len(PROMPT), marks)))
    assert run.ids["c"] == TINY.greedy([*PROMPT, *ids, 1, 2], 8)
    assert run.cached["c"] == len(PROMPT) + 11


def test_on_a_base_it_goes_on_too() -> None:
    run = Answers(engine()).run(request("a", PROMPT, 4, session="s"))
    base = Base(len(PROMPT), chain_digest(EMPTY_DIGEST, packed(PROMPT)))
    ids = TINY.greedy([*PROMPT, 7, 7], 9)
    run.run(begun(request("", [7, 7], 9, session="s", base=base), ids[:3], 3))
    assert run.ids["b"] == ids[3:]
    usage = run.last["b"].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT) + 2, 9)
    assert usage.cached_tokens >= len(PROMPT)


@pytest.mark.parametrize(
    ("sampling", "ids", "finish", "text"),
    [
        ({"max_tokens": 3}, [1, 2, 3], "length", "3"),
        ({"stop": ("23",)}, [1, 2, 3], "stop", ""),
        ({"stop_token_ids": (3,)}, [1, 2, 3], "stop", ""),
    ],
)
def test_what_was_over_already_ends_at_once(sampling: dict[str, Any], ids: list[int], finish: str, text: str) -> None:
    """The first one had generated the last id, and died before it said so."""
    asked: Request = request("a", PROMPT, **({"max_tokens": 8} | sampling))
    told = 1 if "stop" in sampling else 2
    run = Answers(engine()).run(begun(asked, ids, told))
    assert run.ids["b"] == []
    assert (run.last["b"].finish, run.text["b"]) == (finish, text)
    assert run.last["b"].usage == Usage(len(PROMPT), 3, 0, prefix_bits=16)


def test_more_ids_than_came_are_refused() -> None:
    with pytest.raises(RequestRefused):
        engine().submit(replace(request("a", [1]), generated=Generated(1, 0)))
    with pytest.raises(RequestRefused):
        engine().submit(replace(request("a", [1]), generated=Generated(2, 0)))
