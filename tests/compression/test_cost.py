"""Prices of the ways to shrink a prompt, in tokens of prefill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.cost import DECODED, HELD, REQUEST_TOKENS, Option, Way, cheapest, expected_turns, price


def priced(way: Way, **given: Any) -> Option:
    known = {"tokens_before": 6000, "tokens_after": 3000, "first_changed": 1000, "turns_to_come": 20}
    return price(way, **{**known, **given})


def test_what_is_removed_pays_at_every_turn_to_come() -> None:
    assert priced("trim").brings == pytest.approx(3000 * 20 * HELD)
    assert priced("trim", turns_to_come=40).brings == pytest.approx(2 * priced("trim").brings)


def test_what_stands_after_the_first_changed_block_is_prefilled_again() -> None:
    assert priced("trim", first_changed=1024, block_size=32).reprefill_tokens == 3000 - 1024
    assert priced("trim", first_changed=1055, block_size=32).reprefill_tokens == 3000 - 1024
    assert priced("trim", first_changed=1055, block_size=1).reprefill_tokens == 3000 - 1055
    assert priced("trim", first_changed=5000).reprefill_tokens == 0


def test_only_a_summary_by_a_model_costs_a_call() -> None:
    assert priced("summarize", summary_tokens=100).call_tokens == REQUEST_TOKENS + 100 * DECODED
    assert priced("summarize").call_tokens == 0, "segments that are merged alone need no model"
    assert priced("extract", summary_tokens=100).call_tokens == 0
    assert priced("trim", summary_tokens=100).call_tokens == 0


def test_to_keep_everything_costs_and_brings_nothing() -> None:
    keep = priced("keep", tokens_after=6000, first_changed=0)
    assert (keep.brings, keep.reprefill_tokens, keep.call_tokens, keep.worth) == (0, 0, 0, 0)


def test_the_cheapest_is_worth_most_of_those_that_are_open() -> None:
    early, late = priced("trim", first_changed=100), priced("elide", first_changed=2900)
    assert cheapest([early, late]) == late
    assert cheapest([early, replace(late, eligible=False, why="it would free too little")]) == early
    assert cheapest([replace(early, eligible=False)]) is None
    assert cheapest([]) is None


def test_of_equal_options_the_first_is_taken() -> None:
    one, two = priced("elide"), priced("trim")
    assert one.worth == two.worth
    assert cheapest([one, two]) is one


def test_an_option_shows_its_price_and_what_stands_against_it() -> None:
    shown = priced("trim", eligible=False, why="no").as_json()
    assert shown == {
        "way": "trim",
        "tokens_after": 3000,
        "brings": 9000.0,
        "reprefill_tokens": 2008,
        "call_tokens": 0.0,
        "eligible": False,
        "why": "no",
        "worth": 6992.0,
    }


@given(st.integers(0, 10**6))
def test_a_conversation_is_expected_to_last_as_long_again_within_bounds(turns: int) -> None:
    assert expected_turns(turns) == (4 if turns < 4 else turns if turns < 40 else 40)
