"""Cached pages in the order in which they may go. Knows neither their content nor why a policy likes it.

    group    | oldest run: pages of one release ... | ... | youngest run |       one queue for each group of the policy
    due      worth least when its turn came, but with cached descendants: goes right after the last of them
    pinned   not before the others, while there are no more than the quota and they are used again in time

Adding and removing take O(1) a page, a victim O(log groups), and a call for victims once more O(groups). A page that
was taken meanwhile is found stale when its turn comes; lists that are mostly stale are cleaned out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.eviction import EvictionPolicy, Groups

Pages = NDArray[np.int32]

STALE = 4096  # entries that may be stale besides as many as are not
PIN_S = 3600.0  # a pinned page that nobody used for so long is an ordinary one


@dataclass(slots=True)
class _Run:
    pages: list[int]  # head of the path first; taken from the end
    stamp: int
    released_s: float


class Evictor:
    """`leaf(page)`: no cached page hangs on it. `above(page)`: the cached page that it hangs on, 0 if none. At most
    `pin_quota` pages are pinned, and none longer than `pin_s` after its last use."""

    def __init__(
        self,
        num_pages: int,
        policy: EvictionPolicy,
        *,
        leaf: Callable[[int], bool] = lambda page: True,
        above: Callable[[int], int] = lambda page: 0,
        pin_quota: int = 0,
        pin_s: float = PIN_S,
    ) -> None:
        self._policy = policy
        self._leaf, self._above = leaf, above
        self._pin_quota, self._pin_s = pin_quota, pin_s
        self._stamp = np.zeros(num_pages + 1, np.int64)  # of the run that a page stands in; 0: in none
        self._clock = 0
        self._queues: dict[int, deque[_Run]] = {}
        self._listed = 0  # entries of all queues
        self._live = 0
        self._due: dict[int, int] = {}  # page -> its stamp
        self._ready: list[int] = []  # due, and perhaps a leaf by now
        self._pinned: deque[_Run] = deque()
        self._is_pinned = np.zeros(num_pages + 1, np.bool_)
        self.group = np.zeros(num_pages + 1, np.int64)  # that a page was added in
        self.released_s = np.zeros(num_pages + 1)  # and when it was let go
        self._num_pinned = 0

    def __len__(self) -> int:
        return self._live

    @property
    def pinned(self) -> int:
        return self._num_pinned

    def add(self, pages: Pages, groups: Groups, now_s: float, pinned: NDArray[np.bool_] | None = None) -> None:
        """`pages` of one release, in none of the queues, the head of the path first."""
        if not len(pages):
            return
        self._clock += 1
        self._stamp[pages] = self._clock
        self.group[pages], self.released_s[pages] = groups, now_s
        self._live += len(pages)
        if pinned is not None and bool(pinned.any()):
            self._pin(pages[pinned], now_s)
            pages, groups = pages[~pinned], groups[~pinned]
        self._list(pages, groups, self._clock, now_s)
        if self._listed > 2 * self._live + STALE:
            self._clean()

    def remove(self, pages: Pages) -> None:
        """They are taken, or gone; those that stand in no queue are nothing."""
        self._live -= int(np.count_nonzero(self._stamp[pages]))
        self._stamp[pages] = 0
        self._num_pinned -= int(np.count_nonzero(self._is_pinned[pages]))
        self._is_pinned[pages] = False

    def rename(self, old: Pages, new: Pages) -> None:
        """What stood at `old` stands at `new` (in none of the queues), in its place."""
        names = {o: n for o, n in zip(old.tolist(), new.tolist(), strict=True) if self._stamp[o]}
        self._stamp[new], self._stamp[old] = self._stamp[old], 0
        self.group[new], self.released_s[new] = self.group[old], self.released_s[old]
        self._is_pinned[new], self._is_pinned[old] = self._is_pinned[old], False
        stamps = {int(self._stamp[page]) for page in names.values()}
        for runs in (self._pinned, *self._queues.values()) if names else ():
            for run in runs:
                if run.stamp in stamps:
                    run.pages = [names.get(page, page) for page in run.pages]
        self._due = {names.get(page, page): stamp for page, stamp in self._due.items()}
        self._ready = [names.get(page, page) for page in self._ready]

    def reconsider(self) -> None:
        """Pages have gone by another way than `evict`: what waits for them need not."""
        self._ready = list(self._due)

    def evict(self, count: int, now_s: float, gone: Callable[[int], None]) -> list[int]:
        """The `count` pages that are worth least, or all there are; `gone` is told of each at once."""
        victims: list[int] = []
        ready, self._ready = self._ready, []
        while ready and len(victims) < count:
            self._go_up(ready.pop(), victims, count, gone)
        self._ready += ready
        self._lapse(now_s)
        heap = self._heads(list(self._queues), now_s)
        while len(victims) < count and (heap or self._pinned):
            if not heap:
                heap = self._heads(self._unpin(len(self._pinned[0].pages)), now_s)
                continue
            worth, key = heap[0]
            run = self._front(key)
            if run is None:
                heapq.heappop(heap)
            elif (current := self._worth(key, now_s - run.released_s)) != worth:
                heapq.heapreplace(heap, (current, key))
            else:
                page = run.pages.pop()
                self._listed -= 1
                self._due[page] = run.stamp
                self._go_up(page, victims, count, gone)
        while len(victims) < count and self._due:  # what they wait for is in use: it does without them
            page, stamp = self._due.popitem()
            if self._stamp[page] == stamp:
                self._go(page, victims, gone)
        return victims

    def check(self) -> None:
        """The books agree with themselves: every page stands in one place."""
        places = [page for queue in self._queues.values() for run in queue for page in self._valid(run)]
        pinned = [page for run in self._pinned for page in self._valid(run)]
        due = [page for page, stamp in self._due.items() if self._stamp[page] == stamp]
        assert self._listed == self._entries(), "entries miscounted"
        assert self._num_pinned == len(pinned) == int(self._is_pinned.sum()), "pinned pages miscounted"
        assert self._num_pinned <= self._pin_quota, "more is pinned than the quota"
        everywhere = sorted([*places, *pinned, *due])
        assert everywhere == np.flatnonzero(self._stamp).tolist(), "a page stands in no queue, or in two"
        assert len(everywhere) == self._live, "cached pages miscounted"

    # ------------------------------------------------------------------ going
    def _go_up(self, page: int, victims: list[int], count: int, gone: Callable[[int], None]) -> None:
        """A due page goes if it may, and after it those above it that only waited for it."""
        while page and len(victims) < count:
            stamp = self._due.get(page)
            if stamp is None:
                return
            if self._stamp[page] != stamp:
                del self._due[page]
                return
            if not self._leaf(page):
                return
            del self._due[page]
            page = self._go(page, victims, gone)
        if page in self._due:
            self._ready.append(page)

    def _go(self, page: int, victims: list[int], gone: Callable[[int], None]) -> int:
        above = self._above(page)
        self._stamp[page] = 0
        self._live -= 1
        victims.append(page)
        gone(page)
        return above

    # ------------------------------------------------------------------ queues
    def _list(self, pages: Pages, keys: Groups, stamp: int, released_s: float) -> None:
        """Runs of equal keys, the last pages of the path first. A key is a group, or -1 - group for pages that were
        pinned: they come late, and would break the order of the others."""
        if not len(pages):
            return
        edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(pages)]
        for start, stop in zip(edges[-2::-1], edges[:0:-1], strict=True):
            run = _Run(pages[start:stop].tolist(), stamp, released_s)
            self._queues.setdefault(int(keys[start]), deque()).append(run)
        self._listed += len(pages)

    def _worth(self, key: int, idle_s: float) -> float:
        return self._policy.worth(key if key >= 0 else -1 - key, idle_s)

    def _heads(self, keys: list[int], now_s: float) -> list[tuple[float, int]]:
        """A heap of (worth of the oldest page, key)."""
        runs = ((key, self._front(key)) for key in keys)
        heap = [(self._worth(key, now_s - run.released_s), key) for key, run in runs if run is not None]
        heapq.heapify(heap)
        return heap

    def _front(self, key: int) -> _Run | None:
        """The oldest run under a key that ends in a page that still stands there."""
        queue = self._queues.get(key)
        while queue:
            run = queue[0]
            while run.pages and self._stamp[run.pages[-1]] != run.stamp:
                run.pages.pop()
                self._listed -= 1
            if run.pages:
                return run
            queue.popleft()
        self._queues.pop(key, None)
        return None

    def _valid(self, run: _Run) -> list[int]:
        return [page for page in run.pages if self._stamp[page] == run.stamp]

    def _clean(self) -> None:
        for runs in (self._pinned, *self._queues.values()):
            for run in runs:
                run.pages = self._valid(run)
        self._pinned = deque(run for run in self._pinned if run.pages)
        self._queues = {key: deque(run for run in runs if run.pages) for key, runs in self._queues.items()}
        self._listed = self._entries()

    def _entries(self) -> int:
        return sum(len(run.pages) for runs in (self._pinned, *self._queues.values()) for run in runs)

    # ------------------------------------------------------------------ pins
    def _pin(self, pages: Pages, now_s: float) -> None:
        self._pinned.append(_Run(pages.tolist(), self._clock, now_s))
        self._listed += len(pages)
        self._is_pinned[pages] = True
        self._num_pinned += len(pages)
        while self._num_pinned > self._pin_quota:
            self._unpin(self._num_pinned - self._pin_quota)

    def _lapse(self, now_s: float) -> None:
        while self._pinned and now_s - self._pinned[0].released_s > self._pin_s:
            self._unpin(len(self._pinned[0].pages))

    def _unpin(self, most: int) -> list[int]:
        """Make at most `most` pages of the oldest pinned run ordinary ones, its last first -> the keys they got."""
        run = self._pinned[0]
        tail, run.pages = run.pages[max(len(run.pages) - most, 0) :], run.pages[: max(len(run.pages) - most, 0)]
        self._listed -= len(tail)
        if not run.pages:
            self._pinned.popleft()
        pages = np.array([page for page in tail if self._stamp[page] == run.stamp], np.int32)
        self._is_pinned[pages] = False
        self._num_pinned -= len(pages)
        keys = -1 - self.group[pages]
        self._list(pages, keys, run.stamp, run.released_s)
        return list(dict.fromkeys(keys.tolist()))
