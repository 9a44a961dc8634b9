"""The pool's books: which page is free, cached or in use. Knows no tensors, no tokens and no requests.

    page 0        guard: never allocated, padding points at it
    free          no content                        allocate ->  in use
    in use        ref > 0                           release  ->  cached if it is named, else free
    cached        ref = 0, named by a uid           take -> in use;  evict -> free

    free + cached + used = total

A name (uid) says whose content a page holds. Uids are never used twice, so `owner[page] == uid` proves that a page
still holds what it held when somebody wrote the pair down: a kept path needs no lock on its pages.

A tag says which session brought the content; `users` remembers further sessions of a shared page. A free page keeps
both until it is given out again: its content is still there, and `forget` must find it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.eviction import EvictionPolicy

MAX_USERS = 1000  # sessions told apart on a shared page; a page with more (a system prompt) is nobody's to erase

Pages = NDArray[np.int32]
Uids = NDArray[np.int64]
Slots = NDArray[np.int64]


class PageContents(Protocol):
    """The tensors behind the pages, as far as the books need them."""

    def freed(self, pages: Pages) -> None:
        """Called when pages become free (a debug build fills them with NaN)."""
        ...

    def allocated(self, pages: Pages) -> None:
        """Called before pages are given out."""
        ...

    def zero(self, pages: Pages) -> None: ...

    def copy(self, source: int, target: int, num_slots: int) -> None:
        """Copy the first `num_slots` slots of page `source` to page `target`, in every layer."""
        ...

    def move(self, source: Slots, target: Slots, old: int, new: int) -> None:
        """Copy slots that hold positions from `old` on to slots that stand for positions from `new` on."""
        ...


class KVPool:
    """Books over pages 1 ... `num_pages`. `on_evict(uid)` is told each name whose page was given to somebody else."""

    def __init__(
        self, num_pages: int, contents: PageContents, policy: EvictionPolicy, on_evict: Callable[[int], None]
    ) -> None:
        self.total = num_pages
        self.ref = np.zeros(num_pages + 1, np.int32)
        self.owner = np.zeros(num_pages + 1, np.int64)  # 0: no name
        self.tag = np.zeros(num_pages + 1, np.int64)  # 0: no session
        self.users: dict[int, set[int]] = {}  # of pages that sessions besides `tag` have used
        self.evictions = 0
        self._stamp = np.zeros(num_pages + 1, np.int64)
        self._clock = 0
        self._is_free = np.ones(num_pages + 1, np.bool_)
        self._is_free[0] = False
        self._num_free = num_pages
        self._num_cached = 0
        self._victims: list[tuple[int, int]] = []  # (page, its stamp when listed), first victim last
        self._contents = contents
        self._policy = policy
        self._on_evict = on_evict

    @property
    def free(self) -> int:
        return self._num_free

    @property
    def cached(self) -> int:
        return self._num_cached

    @property
    def used(self) -> int:
        return self.total - self._num_free - self._num_cached

    def available(self, besides: Pages) -> int:
        """Pages that `allocate` could give after `take(besides)`."""
        return self._num_free + self._num_cached - int(np.count_nonzero(self.ref[besides] == 0))

    def resident(self, pages: Pages, uids: Uids) -> int:
        """How many of the pairs, from the first on, still hold."""
        same = self.owner[pages] == uids
        return len(pages) if bool(same.all()) else int(same.argmin())

    def take(self, pages: Pages, tag: int) -> None:
        """One more reference to each of `pages` (distinct; named or in use)."""
        self._num_cached -= int(np.count_nonzero(self.ref[pages] == 0))
        self.ref[pages] += 1
        for page in pages[self.tag[pages] != tag].tolist():
            users = self.users.setdefault(page, set())
            users.add(tag if len(users) < MAX_USERS else 0)

    def allocate(self, count: int, tag: int, after: int = 0) -> Pages | None:
        """`count` pages with one reference each, or None and nothing changed.

        Follows page `after` where that is free: a path in one run can be read without a copy.
        """
        if count > self._num_free + self._num_cached:
            return None
        if count > self._num_free:
            self._evict(count - self._num_free)
        pages = self._choose(count, after)
        self._is_free[pages] = False
        self._num_free -= count
        self.ref[pages] = 1
        self._disown(pages)
        self.tag[pages] = tag
        self._contents.allocated(pages)
        return pages

    def release(self, pages: Pages) -> None:
        """One reference less to each of `pages`, the head of a path first."""
        self.ref[pages] -= 1
        idle = pages[self.ref[pages] == 0]
        named = self.owner[idle] != 0
        kept = idle[named]
        self._clock += len(kept)
        self._stamp[kept] = np.arange(self._clock, self._clock - len(kept), -1)
        self._num_cached += len(kept)
        self._to_free(idle[~named])

    def name(self, page: int, uid: int) -> None:
        """Give a page in use its content's name."""
        assert self.ref[page] > 0, f"page {page} is named while nobody holds it"
        self.owner[page] = uid

    def unname(self, page: int) -> None:
        """Take the content's name away; a cached page becomes free."""
        if self.owner[page] == 0:
            return
        self.owner[page] = 0
        if self.ref[page] == 0:
            self._num_cached -= 1
            self._to_free(np.array([page], np.int32))

    def forget(self, tag: int) -> tuple[int, list[int]]:
        """Free and zero the cached pages that only session `tag` used, and zero what it left in free ones
        -> (pages freed, names that went)."""
        shared = [page for page, others in self.users.items() if tag in others]
        left = np.union1d(np.array(shared, np.int32), np.flatnonzero(self.tag == tag).astype(np.int32))
        left = left[self._is_free[left]]
        self._contents.zero(left)
        self._disown(left)
        for page in shared:
            if page in self.users:
                self.users[page].discard(tag)
        gone: list[int] = []
        for page in np.flatnonzero(self.tag == tag).tolist():
            others = self.users.get(page)
            if others:
                self.tag[page] = others.pop()
            elif self.ref[page] == 0:
                gone.append(page)
            else:
                self.tag[page] = 0
        pages = np.array(gone, np.int32)
        uids = self.owner[pages].tolist()
        self._contents.zero(pages)
        self.owner[pages] = 0
        self._num_cached -= len(gone)
        self._to_free(pages)
        self._disown(pages)
        return len(gone), uids

    def check(self) -> None:
        """The books agree with themselves."""
        cached = (self.ref == 0) & (self.owner != 0)
        guard = (int(self.ref[0]), int(self.owner[0]), bool(self._is_free[0]))
        assert guard == (0, 0, False), "the guard page was given out"
        assert int(self.ref.min()) >= 0, "a reference too few"
        assert self._num_free == int(self._is_free.sum()), "free pages miscounted"
        assert self._num_cached == int(cached.sum()), "cached pages miscounted"
        assert not bool((self._is_free & ((self.ref != 0) | (self.owner != 0))).any()), "a free page is held or named"
        assert self._num_free + self._num_cached + int((self.ref > 0).sum()) == self.total, "a page was lost"
        named = self.owner[self.owner != 0]
        assert len(np.unique(named)) == len(named), "two pages under one name"

    def _to_free(self, pages: Pages) -> None:
        if not len(pages):
            return
        self._is_free[pages] = True
        self._num_free += len(pages)
        self._contents.freed(pages)

    def _disown(self, pages: Pages) -> None:
        self.tag[pages] = 0
        if self.users:
            for page in pages.tolist():
                self.users.pop(page, None)

    def _evict(self, count: int) -> None:
        """Free `count` cached pages. The list of victims stays right between calls: whoever was cached, or touched,
        after it was drawn up carries a younger stamp than everybody on it."""
        gone: list[int] = []
        while len(gone) < count:
            if not self._victims:
                cached = np.flatnonzero((self.ref == 0) & (self.owner != 0)).astype(np.int32)
                cached = cached[~np.isin(cached, gone)] if gone else cached
                order = self._policy.order(cached, self._stamp[cached])[::-1]
                self._victims = list(zip(order.tolist(), self._stamp[order].tolist(), strict=True))
            page, stamp = self._victims.pop()
            if self.ref[page] == 0 and self.owner[page] != 0 and self._stamp[page] == stamp:
                gone.append(page)
        pages = np.array(gone, np.int32)
        uids = self.owner[pages].tolist()
        self.owner[pages] = 0
        self._num_cached -= count
        self.evictions += count
        self._to_free(pages)
        for uid in uids:
            self._on_evict(uid)

    def _choose(self, count: int, after: int) -> Pages:
        """Free pages, in as few runs as may be. A new run starts amid the longest stretch of free pages, so that
        several growing paths leave each other room."""
        chosen: list[NDArray[np.int32]] = []
        left = count
        page = after + 1
        if after:
            stretch = self._is_free[page : page + left]
            run = len(stretch) if bool(stretch.all()) else int(stretch.argmin())
            chosen.append(np.arange(page, page + run, dtype=np.int32))
            left -= run
        if left:
            free = self._is_free.copy()
            if chosen:
                free[chosen[0]] = False
            edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).view(np.int8)))
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            for i in np.argsort(-lengths, kind="stable").tolist():
                room = int(lengths[i])
                run = min(left, room)
                first = int(starts[i]) + ((room - run) // 2 if starts[i] > 1 else 0)
                chosen.append(np.arange(first, first + run, dtype=np.int32))
                left -= run
                if not left:
                    break
        return np.concatenate(chosen) if chosen else np.empty(0, np.int32)
