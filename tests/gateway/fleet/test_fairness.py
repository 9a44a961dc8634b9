"""Start-time fair queueing: who asks much waits behind who asks little, and nobody is served out of their own order."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.fairness import KEPT_IDLE, FairOrder


def jain(shares: list[float]) -> float:
    """Jain's index: 1 where all are equal, 1/n where one has everything (Jain, Chiu, Hawe 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def test_a_storm_of_one_tenant_leaves_the_others_their_share() -> None:
    order: FairOrder[tuple[str, int]] = FairOrder()
    for n in range(500):
        order.push("storm", ("storm", n), 100.0)
    for tenant in "abcd":
        for n in range(40):
            order.push(tenant, (tenant, n), 100.0)
    served = Counter(order.pop()[0] for _ in range(200))
    assert set(served.values()) == {40}
    assert jain([float(n) for n in served.values()]) == 1.0
    first_come = Counter({"storm": 200})  # what a plain line would have done
    assert jain([float(first_come[t]) for t in ("storm", *"abcd")]) == 0.2


def test_who_asks_for_long_answers_gets_fewer_of_them() -> None:
    order: FairOrder[tuple[str, int]] = FairOrder()
    for n in range(100):
        order.push("long", ("long", n), 400.0)
        order.push("short", ("short", n), 100.0)
    served = Counter(order.pop()[0] for _ in range(50))
    assert served == {"long": 10, "short": 40}


def test_who_was_idle_gains_nothing_by_it() -> None:
    order: FairOrder[tuple[str, int]] = FairOrder()
    for n in range(50):
        order.push("a", ("a", n), 1.0)
    for _ in range(30):
        order.pop()
    for n in range(20):
        order.push("b", ("b", n), 1.0)
    served = Counter(order.pop()[0] for _ in range(20))
    assert served == {"a": 10, "b": 10}


def test_an_entry_that_leaves_unserved_costs_its_tenant_nothing() -> None:
    order: FairOrder[tuple[str, int]] = FairOrder()
    for n in range(10):
        order.push("a", ("a", n), 1000.0)
        order.push("b", ("b", n), 1.0)
    for n in range(1, 10):
        assert order.discard("a", ("a", n))
    assert not order.discard("a", ("a", 1))
    assert [order.pop()[0] for _ in range(11)] == ["a", *["b"] * 10]
    with pytest.raises(IndexError):
        order.pop()


def test_tenants_that_came_once_are_forgotten() -> None:
    order: FairOrder[int] = FairOrder()
    for n in range(8 * KEPT_IDLE):
        order.push(f"tenant-{n}", n, float(1 + n % 7))
        order.pop()
    assert len(order._lines) <= 2 * KEPT_IDLE


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.sampled_from(("push", "pop", "drop"))), max_size=80
    )
)
def test_against_a_naive_oracle(steps: list[tuple[str, int, str]]) -> None:
    order: FairOrder[int] = FairOrder()
    waiting: dict[str, list[int]] = defaultdict(list)
    for number, (tenant, cost, what) in enumerate(steps):
        if what == "push":
            order.push(tenant, number, float(cost))
            waiting[tenant].append(number)
        elif what == "drop" and waiting[tenant]:
            assert order.discard(tenant, waiting[tenant].pop())
        elif what == "pop" and any(waiting.values()):
            entry = order.pop()
            assert entry in {line[0] for line in waiting.values() if line}, "out of its tenant's order"
            next(line for line in waiting.values() if line and line[0] == entry).pop(0)
        assert len(order) == sum(map(len, waiting.values()))
        assert all(order.waiting(name) == len(line) for name, line in waiting.items())
        assert order.longest()[1] == max(map(len, waiting.values()), default=0)


@given(st.lists(st.integers(1, 50), min_size=30, max_size=60), st.lists(st.integers(1, 50), min_size=30, max_size=60))
def test_two_that_both_wait_are_never_further_apart_than_the_two_largest_costs(a: list[int], b: list[int]) -> None:
    order: FairOrder[tuple[str, int, int]] = FairOrder()
    for tenant, costs in (("a", a), ("b", b)):
        for n, cost in enumerate(costs):
            order.push(tenant, (tenant, n, cost), float(cost))
    served = {"a": 0, "b": 0}
    while order.waiting("a") and order.waiting("b"):
        tenant, _, cost = order.pop()
        served[tenant] += cost
        assert abs(served["a"] - served["b"]) <= max(a) + max(b)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=30))
def test_what_is_served_at_once_counts_as_what_waited(served: list[tuple[str, int]]) -> None:
    at_once: FairOrder[int] = FairOrder()
    waited: FairOrder[int] = FairOrder()
    for number, (tenant, cost) in enumerate(served):
        at_once.charge(tenant, float(cost))
        waited.push(tenant, number, float(cost))
        waited.pop()
    for order in (at_once, waited):
        for number, tenant in enumerate("aabbcc"):
            order.push(tenant, number, 5.0)
    assert [at_once.pop() for _ in range(6)] == [waited.pop() for _ in range(6)]
