"""The budget's arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.budget import (
    Budget,
    answer_reserve,
    answer_tokens,
    breaker_open,
    least_answer,
    least_gain,
    share,
)

WINDOWS = st.integers(1, 1_000_000)


@pytest.mark.parametrize(
    ("prompt", "reserve", "past", "fits"),
    [
        (699, 0, False, True),
        (700, 0, False, True),
        (701, 0, True, True),
        (600, 101, True, True),
        (1000, 0, True, False),
    ],
)
def test_the_trigger_counts_the_reserve(prompt: int, reserve: int, past: bool, fits: bool) -> None:
    budget = Budget(window=1000, prompt_tokens=prompt, reserve_tokens=reserve)
    assert (budget.past_trigger, budget.fits) == (past, fits)
    assert budget.headroom_tokens == 1000 - prompt
    assert budget.used_ratio == prompt / 1000


@given(WINDOWS, st.integers(0, 1_000_000), st.none() | st.integers(1, 10**7), st.integers(1, 10**6))
def test_an_answer_never_passes_the_window(window: int, prompt: int, asked: int | None, default: int) -> None:
    allowed = answer_tokens(window, prompt, asked, default)
    assert 0 <= allowed <= max(0, window - prompt)
    assert allowed <= (asked if asked is not None else default)


@pytest.mark.parametrize(("asked", "reserve"), [(None, 512), (100, 100), (5000, 2048), (0, 0)])
def test_a_reserve_is_what_the_answer_may_take_and_a_quarter_at_most(asked: int | None, reserve: int) -> None:
    assert answer_reserve(8192, asked, 512) == reserve


def test_an_answer_needs_a_sixteenth_at_least_or_all_it_may_have() -> None:
    assert least_answer(8192, 2048) == 512
    assert least_answer(8192, 100) == 100


@pytest.mark.parametrize(("ratio", "tokens"), [(0.7, 5734), (0.0, 0), (1.0, 8192), (1.5, 8192), (-1.0, 0)])
def test_a_share_is_of_the_window_and_never_more(ratio: float, tokens: int) -> None:
    assert share(ratio, 8192) == tokens


def test_a_compaction_must_free_a_twentieth_of_the_window() -> None:
    assert least_gain(8192) == 409
    assert least_gain(1) == 1


@pytest.mark.parametrize(
    ("failures", "now", "left_alone"),
    [(2, 6000, False), (3, 6000, True), (3, 6409, True), (3, 6410, False), (9, 6000, True), (3, 100, True)],
)
def test_after_three_in_vain_the_next_waits_until_the_prompt_has_grown(
    failures: int, now: int, left_alone: bool
) -> None:
    assert breaker_open(failures, 6000, now, 8192) == left_alone
