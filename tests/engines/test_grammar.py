"""A grammar masks the logits, ends where it must, and a bad one is refused without harm."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engines.contract import Grammar, RequestRefused
from engines.local.grammar import Grammars

pytestmark = pytest.mark.model
VOCAB, EOS = 49152, 2


@pytest.fixture(scope="module")
def grammars(model_dir: Path) -> Grammars:
    return Grammars(model_dir, vocab=VOCAB, eos_ids=[EOS])


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def sample(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, seed: int, most: int = 200) -> str | None:
    """Random tokens that the mask allows, until it ends; None when it did not end in `most` tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = grammars(grammar)
    ids: list[int] = []
    for _ in range(most):
        if mask.finished:
            return tokenizer.decode(ids)
        logits = torch.rand(VOCAB, generator=generator)
        logits[EOS] += 0.5  # or random text in a string never ends
        mask.apply(logits)
        chosen = int(logits.argmax())
        if chosen == EOS:
            return tokenizer.decode(ids)
        ids.append(chosen)
        mask.accept(chosen)
    return None


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_under_a_schema_is_valid(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    text = sample(grammars, tokenizer, Grammar("json_schema", SCHEMA), seed)
    assert text is not None
    found = json.loads(text)
    assert found["colour"] in ("red", "green")
    assert 0 <= found["count"] <= 99
    assert set(found) == {"colour", "count"}


@pytest.mark.parametrize(
    ("grammar", "answers"),
    [
        (Grammar("regex", "(yes|no)"), {"yes", "no"}),
        (Grammar("lark", 'start: "left" | "right"'), {"left", "right"}),
    ],
)
def test_a_closed_grammar_gives_one_of_its_answers(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, answers: set[str]
) -> None:
    assert {sample(grammars, tokenizer, grammar, seed) for seed in range(4)} <= answers


def test_a_json_object_begins_with_a_brace_and_cannot_end_before_it_closes(grammars: Grammars) -> None:
    mask = grammars(Grammar("json_object"))
    logits = torch.zeros(VOCAB)
    mask.apply(logits)
    assert logits[EOS] == float("-inf")
    assert not mask.finished


def test_columns_beyond_the_tokenizer_are_never_chosen(grammars: Grammars) -> None:
    logits = torch.zeros(VOCAB + 64)
    grammars(Grammar("json_object")).apply(logits)
    assert bool((logits[VOCAB:] == float("-inf")).all())


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '"text"'),
        Grammar("json_schema", '{"type": "no such type"}'),
        Grammar("json_schema", '{"$ref": "#/nowhere"}'),
        Grammar("lark", "start: missing"),
        Grammar("lark", ""),
        Grammar("regex", "(unclosed"),
        Grammar("regex", "a" * 70_000),
    ],
)
def test_a_bad_grammar_is_refused_quickly_and_the_next_request_works(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    began_s = time.monotonic()
    with pytest.raises(RequestRefused) as refused:
        grammars(grammar)
    assert refused.value.param == "grammar"
    assert time.monotonic() - began_s < 5
    assert sample(grammars, tokenizer, Grammar("regex", "ok"), 0) == "ok"


def test_a_heavy_grammar_costs_bounded_time_or_is_refused(grammars: Grammars, tokenizer: Tokenizer) -> None:
    heavy = Grammar("regex", "((((a{1,1000}b?){1,1000}c?){1,1000}d?){1,1000})")
    began_s = time.monotonic()
    try:
        ended = sample(grammars, tokenizer, heavy, 0, most=20)
    except RequestRefused:
        ended = None
    assert ended is None or set(ended) <= set("abcd")
    assert time.monotonic() - began_s < 10


def test_a_token_against_the_grammar_is_refused_not_swallowed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    mask = grammars(Grammar("regex", "yes"))
    mask.accept(tokenizer.encode("no").ids[0])
    assert not mask.finished
    with pytest.raises(RequestRefused):
        mask.apply(torch.zeros(VOCAB))
