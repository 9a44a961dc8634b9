"""The choice by cost: pins hold, caches draw, loads push, nearly equal costs go by the ring."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.cost import Candidate, Choice, cheapest
from gateway.fleet.ring import HashRing
from gateway.fleet.traffic import Traffic

RING = HashRing(["a", "b", "c", "d"])


def choice(*candidates: Candidate, tokens: int = 1000, pin: str | None = None, key: bytes = b"key") -> Choice:
    made = cheapest(candidates, prompt_tokens=tokens, key=key, ring=RING, pin=pin)
    assert made is not None
    return made


def test_answers_on_their_way_send_a_new_turn_elsewhere_and_move_no_pin() -> None:
    busy, idle = Candidate("a", cached=900, recent=1000, answers=8000), Candidate("b", recent=1000)
    assert choice(busy, idle).name == "b"
    assert choice(busy, idle, pin="a").reason == "pinned"


def test_a_pinned_session_stays_though_another_replica_is_idle() -> None:
    made = choice(Candidate("a", cached=900, queued=5000), Candidate("b"), pin="a")
    assert (made.name, made.reason, made.cached) == ("a", "pinned", 900)


def test_a_pinned_session_leaves_a_replica_over_its_bound_for_a_cheaper_one() -> None:
    made = choice(Candidate("a", cached=900, recent=200_000), Candidate("b", recent=1000), pin="a")
    assert (made.name, made.reason) == ("b", "pin_over_bound")


def test_it_stays_over_the_bound_where_moving_costs_more() -> None:
    made = choice(Candidate("a", cached=99_000, recent=1400), Candidate("b", recent=0), tokens=100_000, pin="a")
    assert (made.name, made.reason) == ("a", "pinned")


def test_a_new_session_goes_where_its_prefix_lies() -> None:
    made = choice(Candidate("a"), Candidate("b", cached=480), Candidate("c"))
    assert (made.name, made.reason) == ("b", "cached")


def test_one_cached_chunk_decides_between_equals() -> None:
    assert choice(Candidate("a"), Candidate("b", cached=16), Candidate("c")).name == "b"


def test_what_would_be_pushed_out_counts() -> None:
    made = choice(Candidate("a", loss=500), Candidate("b", loss=10))
    assert (made.name, made.reason) == ("b", "least_cost")


def test_equals_are_told_apart_by_the_ring_and_every_gateway_agrees() -> None:
    names = ["a", "b", "c", "d"]
    for number in range(50):
        key = f"session-{number}".encode()
        one = choice(*map(Candidate, names), key=key)
        assert one.name == choice(*map(Candidate, reversed(names)), key=key).name
        assert (one.name, one.reason) == (next(RING.order(key)), "ring")


def test_a_pin_that_is_no_candidate_is_named_as_the_reason() -> None:
    assert choice(Candidate("a"), pin="z").reason == "pin_unavailable"


def test_nobody_can_take_it() -> None:
    assert cheapest([], prompt_tokens=10, key=b"", ring=RING) is None


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 4), min_size=1, max_size=4), st.integers(1, 10**6))
def test_the_choice_is_among_the_cheapest_and_tells_every_price(
    told: list[tuple[float, float, float, float]], tokens: int
) -> None:
    candidates = [Candidate(name, *numbers) for name, numbers in zip("abcd", told, strict=False)]
    made = choice(*candidates, tokens=tokens)
    assert set(made.costs) == {c.name for c in candidates}
    assert made.costs[made.name] <= min(made.costs.values()) + 9


def test_a_prompt_that_all_sessions_share_is_spread_over_the_replicas() -> None:
    """FIELD: a shared system prompt sent 500 of 500 sessions to one of four replicas."""
    for shared in (50, 500):
        names, held = list("abcd"), set[str]()
        traffic, sessions = {name: Traffic() for name in names}, Counter[str]()
        for number in range(500):
            candidates = [
                Candidate(name, shared if name in held else 0, traffic[name].queued, traffic[name].recent(number / 10))
                for name in names
            ]
            made = choice(*candidates, tokens=shared + 20, key=f"session-{number}".encode())
            held.add(made.name)
            sessions[made.name] += 1
            traffic[made.name].sent(str(number), shared + 20 - made.cached, number / 10)
            traffic[made.name].ended(str(number), 64, number / 10, untold=64)
        assert max(sessions.values()) <= 1.25 * 500 / 4, (shared, sessions)
        assert held == set(names)
