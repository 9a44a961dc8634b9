"""What a drain decides: who is worth moving, in which order, where to, and when it is over."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.drain import (
    HORIZON_S,
    LEAST_CHANCE,
    SETTLE_S,
    SPREAD,
    Progress,
    chance,
    over,
    with_room,
    worth_moving,
)
from gateway.store.replica_records import PinnedSession

NOW = 1_800_000_000.0


def session(id: str, idle_s: float, tokens: int = 1000) -> PinnedSession:
    return PinnedSession("t", id, f"turn-{id}", NOW - 10_000, NOW - idle_s, 3, tokens)


def test_the_last_used_come_first_and_of_those_the_longest() -> None:
    sessions = [session("old", 3000), session("new", 1), session("long", 1, 5000), session("gone", 50_000)]
    assert [s.session_id for s in worth_moving(sessions, NOW)] == ["long", "new", "old"]


def test_a_session_idle_for_nine_times_the_horizon_is_let_go() -> None:
    edge = HORIZON_S * (1 / LEAST_CHANCE - 1)
    assert chance(session("a", 0), NOW) == 1.0
    assert worth_moving([session("in", edge - 1), session("out", edge + 1)], NOW) == [session("in", edge - 1)]
    assert chance(session("future", -50), NOW) == 1.0, "another gateway's clock is ahead"


@given(st.integers(1, 12), st.integers(1, 400))
def test_what_is_moved_is_spread_however_the_choice_among_them_falls(replicas: int, sessions: int) -> None:
    names, moved = [f"r{n}" for n in range(replicas)], Counter[str]()
    for _ in range(sessions):
        can = with_room(moved, names)
        assert can, "somebody always has room"
        moved[min(can)] += 1  # the worst choice: always the same where it may
    assert max(moved.values()) <= max(math.ceil(sessions / replicas), SPREAD * sessions / replicas)


@pytest.mark.parametrize(
    ("progress", "after_s", "until_s", "ended"),
    [
        (Progress(), SETTLE_S - 0.1, None, False),
        (Progress(), SETTLE_S, None, True),
        (Progress(running=1), 1000, None, False),
        (Progress(sessions_left=1), 1000, None, False),
        (Progress(sessions_left=1, running=1), 59, 60, False),
        (Progress(sessions_left=1, running=1), 60, 60, True),
        (Progress(), 1, 0.5, False),
        (Progress(), -1, None, False),  # another gateway's clock is ahead
        (Progress(), -3600, None, True),  # a clock was set back since
    ],
)
def test_it_is_over_when_nothing_is_left_or_its_time_is(
    progress: Progress, after_s: float, until_s: float | None, ended: bool
) -> None:
    until = None if until_s is None else NOW + until_s
    assert over(progress, began_at=NOW, until=until, now=NOW + after_s) is ended


def test_progress_is_read_again_as_it_was_written_whatever_a_newer_version_adds() -> None:
    progress = Progress(sessions_left=3, moved=2, running=1)
    assert Progress.of_json({**progress.as_json(), "new": 1}) == progress
    assert Progress.of_json({}) == Progress()
    assert replace(progress) == progress
