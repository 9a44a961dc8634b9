"""What every eviction policy does alike, and what each does by itself; the evictor against a naive oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.local.kv.cost_aware import TURNS, CostAware
from engines.local.kv.eviction import AdaptiveTtl, EvictionPolicy, Lfu, Lru, Used
from engines.local.kv.evictor import Evictor
from engines.local.kv.history import History
from engines.local.kv.policies import DEFAULT_POLICY, POLICIES, make_policy

Pages = np.ndarray


def pages(*numbers: int) -> Pages:
    return np.array(numbers, np.int32)


class Cache:
    """An evictor whose pages are named by their number, without chains."""

    def __init__(
        self, policy: EvictionPolicy, num_pages: int = 64, *, pin_quota: int = 0, pin_s: float = 100.0
    ) -> None:
        self.policy = policy
        self.evictor = Evictor(num_pages, policy, pin_quota=pin_quota, pin_s=pin_s)

    def use(self, *path: int, now: float, pinned: bool = False, gain: float = 1.0) -> None:
        self.evictor.remove(pages(*path))
        used = Used(np.array(path, np.int64), np.full(len(path), gain))
        groups = self.policy.groups(used, now)
        self.evictor.add(pages(*path), groups, now, np.full(len(path), pinned))
        self.evictor.check()

    def evict(self, count: int, now: float) -> list[int]:
        victims = self.evictor.evict(count, now, lambda page: None)
        self.evictor.check()
        return victims


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param)


class TestEveryPolicy:
    def test_it_goes_by_the_name_it_is_found_under(self, policy: EvictionPolicy) -> None:
        assert type(make_policy(policy.name)) is type(policy)

    def test_the_tail_of_a_path_goes_first(self, policy: EvictionPolicy) -> None:
        cache = Cache(policy)
        cache.use(1, 2, 3, 4, now=0.0)
        assert cache.evict(3, 1.0) == [4, 3, 2]

    def test_of_paths_used_alike_the_oldest_goes_first(self, policy: EvictionPolicy) -> None:
        cache = Cache(policy)
        for page in (3, 1, 2):
            cache.use(page, now=float(page == 1) + 2.0 * (page == 2))
        assert cache.evict(3, 10.0) == [3, 1, 2]

    def test_what_is_in_use_never_goes(self, policy: EvictionPolicy) -> None:
        cache = Cache(policy)
        cache.use(1, 2, 3, now=0.0)
        cache.evictor.remove(pages(2, 3))
        assert cache.evict(3, 1.0) == [1]

    def test_nothing_goes_twice(self, policy: EvictionPolicy) -> None:
        cache = Cache(policy)
        cache.use(1, 2, now=0.0)
        assert sorted(cache.evict(5, 1.0)) == [1, 2]
        assert cache.evict(1, 1.0) == []

    def test_what_has_gone_idle_goes_however_often_it_was_used(self, policy: EvictionPolicy) -> None:
        if policy.name == "lfu":
            pytest.skip("an LFU never forgets a count within its history")
        cache = Cache(policy)
        for second in range(0, 100, 10):
            cache.use(1, now=float(second))
        cache.use(2, now=100_000.0)
        assert cache.evict(1, 100_001.0) == [1]

    def test_a_partial_tail_goes_before_what_was_used_again(self, policy: EvictionPolicy) -> None:
        cache = Cache(policy)
        cache.use(1, now=0.0)
        cache.use(1, now=30.0)
        cache.evictor.add(pages(2), policy.groups(Used(np.zeros(1, np.int64), np.ones(1)), 30.0), 30.0)
        assert cache.evict(1, 31.0) == ([1] if policy.name == "lru" else [2])

    def test_worth_never_rises_while_a_page_is_idle(self, policy: EvictionPolicy) -> None:
        groups = policy.groups(Used(np.arange(5), np.array([1.0, 2.0, 0.5, 1.0, 3.0])), 0.0)
        for group in groups.tolist():
            worths = [policy.worth(group, idle) for idle in (0.0, 0.5, 3.0, 60.0, 5000.0)]
            assert worths == sorted(worths, reverse=True)

    def test_a_long_path_over_and_over_takes_bounded_memory(self, policy: EvictionPolicy) -> None:
        cache = Cache(policy, 2000)
        path = tuple(range(1, 2001))
        for turn in range(30):
            cache.use(*path, now=float(turn))
        assert cache.evictor._listed <= 2 * 2000 + 4096 + 2000

    def test_pins_outlive_others_within_their_quota_and_their_time(self, policy: EvictionPolicy) -> None:
        cache = Cache(policy, pin_quota=2)
        cache.use(1, 2, now=0.0, pinned=True)
        cache.use(3, 4, 5, now=50.0)
        assert cache.evict(2, 51.0) == [5, 4]
        assert cache.evictor.pinned == 2
        assert cache.evict(2, 52.0) == [3, 2], "pinned pages go when nothing else is left"
        cache.use(6, now=60.0, pinned=True)
        cache.use(7, now=61.0, pinned=True)
        assert cache.evictor.pinned == 2, "the oldest lost its pin to the quota"
        assert cache.evict(1, 62.0) == [1]
        cache.use(8, now=1000.0)
        cache.evict(1, 1000.0)
        assert cache.evictor.pinned == 0, "a pin that nobody used lapsed"


def test_the_default_is_cost_aware() -> None:
    assert CostAware.name == DEFAULT_POLICY


def test_lfu_counts_uses_also_over_an_eviction() -> None:
    cache = Cache(Lfu())
    for now in (0.0, 1.0, 2.0):
        cache.use(1, now=now)
    assert cache.evict(1, 3.0) == [1]
    cache.use(1, now=4.0)
    cache.use(2, now=5.0)
    cache.use(2, now=6.0)
    assert cache.evict(2, 7.0) == [2, 1]


def test_adaptive_ttl_keeps_the_slow_one_longer_and_never_for_ever() -> None:
    cache = Cache(AdaptiveTtl(factor=2, first_s=20, min_s=10, max_s=200))
    for now in (0.0, 60.0, 120.0):
        cache.use(1, now=now)
    for now in (118.0, 119.0, 120.0, 121.0):
        cache.use(2, now=now)
    assert cache.evict(1, 140.0) == [2]
    cache.use(3, now=240.0)
    assert cache.evict(1, 261.0) == [1], "its time has run out longer"


def test_cost_aware_keeps_what_costs_more_and_takes_fewer_bytes() -> None:
    cache = Cache(CostAware())
    cache.use(1, now=0.0, gain=4.0)
    cache.use(2, now=0.0, gain=1.0)
    cache.use(3, now=0.0, gain=2.0)
    assert cache.evict(3, 1.0) == [2, 3, 1]


def test_cost_aware_learns_which_kind_comes_back() -> None:
    """Second uses are always followed by a third one, first uses never by a second one but for a few."""
    policy = CostAware()
    now, name = 0.0, 1
    for _ in range(300):
        for _ in range(9):
            name += 1
            policy.groups(Used(np.array([name]), np.ones(1)), now)
        name += 1
        for gap in (0.0, 30.0, 30.0):
            now += gap
            policy.groups(Used(np.array([name]), np.ones(1)), now)
    policy.learn(now)
    once, twice = policy.rates[0], policy.rates[TURNS + 1]
    assert twice > 10 * once


def test_a_history_is_bounded_and_forgets_the_oldest_use() -> None:
    history = History(8)
    for now in range(100):
        seen = history.record(np.array([now + 1, now + 2]), float(now))
        history.check()
    assert len(history) <= 8
    assert seen.uses.tolist() == [2, 1]
    assert history.record(np.array([3]), 100.0).uses.tolist() == [1]


class EvictorMachine(RuleBasedStateMachine):
    """Paths of a tree come, are used again and evicted. The oracle knows each cached page's worth, and walks over all
    of them."""

    PAGES = 24

    def __init__(self) -> None:
        super().__init__()
        self.parent = {page: page // 2 for page in range(1, self.PAGES + 1)}  # a binary tree; page 1 is its root
        self.now = 0.0
        self.cached: dict[int, tuple[int, float]] = {}  # page -> group, released
        self.policy: EvictionPolicy = CostAware(history=History(16))
        self.evictor = Evictor(self.PAGES, self.policy, leaf=self.is_leaf, above=self.above)

    def is_leaf(self, page: int) -> bool:
        return not any(self.parent[other] == page for other in self.cached if other != page)

    def above(self, page: int) -> int:
        return self.parent[page] if self.parent[page] in self.cached else 0

    def worth(self, page: int) -> float:
        group, released = self.cached[page]
        return self.policy.worth(group, self.now - released)

    @rule(
        leaf=st.integers(1, PAGES), wait=st.sampled_from([0.0, 1.0, 70.0, 900.0]), gain=st.sampled_from([0.5, 1.0, 3.0])
    )
    def use(self, leaf: int, wait: float, gain: float) -> None:
        path = [leaf]
        while self.parent[path[-1]]:
            path.append(self.parent[path[-1]])
        path.reverse()
        self.now += wait
        self.evictor.remove(np.array(path, np.int32))
        groups = self.policy.groups(Used(np.array(path, np.int64), np.full(len(path), gain)), self.now)
        for page, group in zip(path, groups.tolist(), strict=True):
            self.cached[page] = (group, self.now)
        self.evictor.add(np.array(path, np.int32), groups, self.now)

    @precondition(lambda self: self.cached)
    @rule(count=st.integers(1, 6), wait=st.sampled_from([0.0, 5.0, 200.0]))
    def evict(self, count: int, wait: float) -> None:
        self.now += wait
        expected = min(count, len(self.cached))
        due: set[int] = set(self.evictor._due)

        def gone(page: int) -> None:
            leaves = [other for other in self.cached if self.is_leaf(other)]
            assert page in leaves, "a page went before what hangs on it"
            least = min(self.worth(other) for other in leaves)
            assert page in due or self.worth(page) <= least or due & set(leaves), "another leaf was worth less"
            del self.cached[page]
            due.update(self.evictor._due)

        assert len(self.evictor.evict(count, self.now, gone)) == expected

    @invariant()
    def books_balance(self) -> None:
        self.evictor.check()
        assert len(self.evictor) == len(self.cached)


EvictorMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestEvictorMachine = EvictorMachine.TestCase


def _lru() -> EvictionPolicy:
    return Lru()


@pytest.mark.parametrize("make", [_lru, CostAware])
def test_a_head_waits_for_a_tail_that_is_worth_more(make: Callable[[], EvictionPolicy]) -> None:
    """1 <- 2: the head is let go first, the tail much later; and the head goes right after its tail."""
    cached = {1, 2}
    evictor = Evictor(
        3,
        make(),
        leaf=lambda page: page != 1 or 2 not in cached,
        above=lambda page: 1 if page == 2 and 1 in cached else 0,
    )
    policy = evictor._policy
    for page, now in ((1, 0.0), (3, 50.0), (2, 100.0)):
        evictor.add(pages(page), policy.groups(Used(np.array([page]), np.ones(1)), now), now)
    assert evictor.evict(1, 101.0, cached.discard) == [3]
    assert evictor.evict(2, 102.0, cached.discard) == [2, 1]
