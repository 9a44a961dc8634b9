"""The budget's arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.budget import Budget, answer_tokens

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
