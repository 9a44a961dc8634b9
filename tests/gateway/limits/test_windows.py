"""The arithmetic of a sliding window: what counts, what is left, and when something fits again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.told import Quota, Told
from gateway.limits.windows import MINUTE_S, Standing


def later(standing: Standing, seconds: float) -> Standing:
    """The same counter after so long without anything more."""
    if seconds < standing.left_s:
        left_s = standing.left_s - seconds
        return Standing(standing.previous, max(0.0, standing.previous_left_s - seconds), standing.current, left_s)
    over = seconds - standing.left_s
    if over >= MINUTE_S:
        return Standing(0, 0.0, 0, float(MINUTE_S))
    return Standing(standing.current, MINUTE_S - over, 0, MINUTE_S - over)


@given(
    previous=st.integers(0, 500),
    current=st.integers(0, 500),
    left=st.floats(0.1, MINUTE_S),
    limit=st.integers(1, 600),
    amount=st.integers(1, 700),
)
def test_what_is_told_to_wait_fits_then_and_not_before(
    previous: int, current: int, left: float, limit: int, amount: int
) -> None:
    standing = Standing(previous, left if previous else 0.0, current, left)
    wait_s = standing.wait_s(limit, amount)
    if wait_s is None:
        assert amount > limit
        return
    assert later(standing, wait_s + 1e-3).used + amount <= limit
    if wait_s > 1.0:
        assert later(standing, wait_s - 1.0).used + amount > limit - max(previous, current) / MINUTE_S - 1
    assert (wait_s == 0) == (standing.used + amount <= limit)


def test_a_minute_that_was_full_comes_back_little_by_little() -> None:
    standing = Standing(previous=60, previous_left_s=30.0, current=30, left_s=30.0)
    assert (standing.used, standing.remaining(60)) == (60, 0)
    assert standing.wait_s(60, 1) == pytest.approx(0.0, abs=1.01)
    assert standing.wait_s(60, 61) is None


def test_headers_are_openais_and_the_drafts() -> None:
    told = Told()
    told.note("requests", Quota(60, 12, 1.5))
    told.note("requests", Quota(100, 50, 9.0))  # the key has more room than its tenant
    told.note("tokens", Quota(1000, 0, 60.0))
    assert dict(told.headers()) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "12",
        "x-ratelimit-reset-requests": "1.5s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "60s",
        "ratelimit-policy": '"requests";q=60;w=60, "tokens";q=1000;w=60',
        "ratelimit": '"requests";r=12;t=2, "tokens";r=0;t=60',
    }
