"""The pool's books: which page is free, cached or in use. Knows no tensors, no tokens and no requests.

    page 0        guard: never allocated, padding points at it
    free          no content                        allocate ->  in use
    in use        ref > 0                           release  ->  cached if it is named, else free
    cached        ref = 0, named by a uid           take -> in use;  evict -> free

    free + cached + used = total                        in full pages; cached is what eviction would free

Besides the full pages 1 ... total there are those of sealed units (`units`), in the same budget: what units take is
missing among the full pages.

A name (uid) says whose content a page holds. Uids are never used twice, so `owner[page] == uid` proves that a page
still holds what it held when somebody wrote the pair down: a kept path needs no lock on its pages.

Which cached page goes first is the evictor's business (evictor.py); the books tell it of every page that is let go.

A tag says which session brought the content; `users` remembers further sessions of a shared page. A free page keeps
both until it is given out again: its content is still there, and `forget` must find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.eviction import EvictionPolicy, Used
from engines.local.kv.evictor import Evictor
from engines.local.kv.free_runs import choose
from engines.local.kv.precision import Bits, Precision
from engines.local.kv.units import Units

MAX_USERS = 1000  # sessions told apart on a shared page; a page with more (a system prompt) is nobody's to erase

Pages = NDArray[np.int32]
Uids = NDArray[np.int64]
Slots = NDArray[np.int64]
NO_PAGES: Pages = np.empty(0, np.int32)


class PageContents(Protocol):
    """The tensors behind the pages, as far as the books need them."""

    def freed(self, pages: Pages) -> None:
        """Called when full pages, or all pages of units, become free (a debug build fills them with NaN)."""
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

    def seal(self, source: Pages, target: Pages) -> bool:
        """Write one unit's `source` pages to sealed `target` pages; False where that cannot be done."""
        ...


class Chains(Protocol):
    """Which name hangs on which, as far as eviction asks (prefix.PrefixIndex)."""

    def drop(self, uid: int) -> None:
        """The page under that name was given to somebody else."""
        ...

    def is_leaf(self, uid: int) -> bool:
        """No block after it has a page."""
        ...

    def above(self, uid: int) -> int:
        """Page of the nearest block before it that has one, 0 if none."""
        ...


class Lower(Protocol):
    """What takes over the content of pages that are evicted."""

    def going(self, page: int) -> None:
        """Its books still stand."""
        ...

    def gone(self) -> None:
        """All that were going have left the books; their content is still there."""
        ...


class KVPool:
    """Books over pages 1 ... `num_pages`. `clock` in seconds; `pin_share` of the pages may be kept before others."""

    def __init__(
        self,
        num_pages: int,
        contents: PageContents,
        policy: EvictionPolicy,
        chains: Chains,
        *,
        clock: Callable[[], float],
        pin_share: float = 0.0,
        units: Units | None = None,
    ) -> None:
        self.total = num_pages
        self.units = units or Units(num_pages)
        ids = self.units.num_ids
        self.ref = np.zeros(ids, np.int32)
        self.owner = np.zeros(ids, np.int64)  # 0: no name
        self.tag = np.zeros(ids, np.int64)  # 0: no session
        self.lineage: Bits = np.full(ids, Precision.FULL, np.int8)  # the fewest bits that the content was made from
        self.users: dict[int, set[int]] = {}  # of pages that sessions besides `tag` have used
        self.evictions = 0
        self.below: Lower | None = None
        self._content = np.zeros(ids, np.int64)  # name of the content, wherever it lies; 0: none
        self._gain = np.ones(ids)  # prefill cost over bytes
        self._pin = np.zeros(ids, np.bool_)
        self._is_free = np.ones(ids, np.bool_)
        self._is_free[0] = False
        self._num_free = num_pages  # full pages without content, those that units stand in the place of included
        self._num_cached = 0  # full pages
        self._contents = contents
        self._policy = policy
        self._chains = chains
        self._clock = clock
        self._evictor = Evictor(
            ids - 1,
            policy,
            leaf=lambda page: chains.is_leaf(int(self.owner[page])),
            above=lambda page: chains.above(int(self.owner[page])),
            pin_quota=int(pin_share * num_pages),
        )

    @property
    def free(self) -> int:
        return self._num_free - self.units.ballast

    @property
    def cached(self) -> int:
        return self.available(NO_PAGES) - self.free

    @property
    def used(self) -> int:
        return self.total - self.available(NO_PAGES)

    @property
    def pressure(self) -> float:
        """The share that is taken, 0 to 1, cached pages included."""
        return 1 - self.free / self.total

    @property
    def pinned(self) -> int:
        return self._evictor.pinned

    def available(self, besides: Pages) -> int:
        """Pages that `allocate` could give after `take(besides)`."""
        full, sealed = self._split(besides)
        idle = int(np.count_nonzero(self.ref[full] == 0))
        return self._num_free + self._num_cached - idle - self.units.ballast_held(sealed)

    def bits(self, pages: Pages) -> Bits:
        return self.units.bits[pages]

    def good(self, page: int, min_bits: int) -> bool:
        """Whether the page, and all it was made from, has `min_bits`."""
        return min(int(self.units.bits[page]), int(self.lineage[page])) >= min(min_bits, Precision.FULL)

    def resident(self, pages: Pages, uids: Uids) -> int:
        """How many of the pairs, from the first on, still hold."""
        same = self.owner[pages] == uids
        return len(pages) if bool(same.all()) else int(same.argmin())

    def take(self, pages: Pages, tag: int) -> None:
        """One more reference to each of `pages` (distinct; named or in use)."""
        idle = pages[self.ref[pages] == 0]
        self._evictor.remove(idle)
        full, sealed = self._split(idle)
        self._num_cached -= len(full)
        self.units.hold(sealed, 1)
        self.ref[pages] += 1
        for page in pages[self.tag[pages] != tag].tolist():
            users = self.users.setdefault(page, set())
            users.add(tag if len(users) < MAX_USERS else 0)

    def allocate(self, count: int, tag: int, after: int = 0) -> Pages | None:
        """`count` pages with one reference each, or None and nothing changed.

        Follows page `after` where that is free: a path in one run can be read without a copy.
        """
        if count > self.available(NO_PAGES):
            return None
        while count > self.free:  # a sealed page may free less than a full one
            self._evict(count - self.free)
        pages = choose(self._is_free[: self.total + 1], count, after if after <= self.total else 0)
        self._is_free[pages] = False
        self._num_free -= count
        self.ref[pages] = 1
        self.lineage[pages] = Precision.FULL
        foreign = [page for page in pages.tolist() if self.tag[page] not in (0, tag) or page in self.users]
        self._contents.zero(np.array(foreign, np.int32))  # what is not written over, no `forget` would find any more
        self._disown(pages)
        self.tag[pages] = tag
        self._contents.allocated(pages)
        return pages

    def allocate_unit(self, precision: Precision, tag: int, first: int, count: int) -> Pages | None:
        """Pages first ... first + count - 1 of a free unit with one reference each, or None and nothing changed. The
        caller knows by `available` that there is room."""
        unit = self.units.take(precision)
        if unit is None:
            return None
        pages = unit[first : first + count]
        self._is_free[pages] = False
        self.ref[pages] = 1
        self.units.hold(pages, 1)
        self.lineage[pages] = Precision.FULL
        self._disown(unit)
        self.tag[pages] = tag
        while self.free < 0:
            self._evict(1)
        return pages

    def release(self, pages: Pages) -> None:
        """One reference less to each of `pages`, the head of a path first."""
        self.ref[pages] -= 1
        idle, named = self.ref[pages] == 0, self.owner[pages] != 0
        self.units.hold(self.units.sealed(pages[idle]), -1)
        held, kept = pages[named], idle[named]
        if len(held):
            now_s = self._clock()
            groups = self._policy.groups(Used(self._content[held], self._gain[held]), now_s)
            self._evictor.add(held[kept], groups[kept], now_s, self._pin[held[kept]])
            self._num_cached += len(self._split(held[kept])[0])
        self._to_free(pages[idle & ~named])

    def name(self, page: int, uid: int, *, content: int = 0, gain: float = 1.0, lineage: int = Precision.FULL) -> None:
        """Give a page in use its content's name. `content` is the same for the same content in any page; `gain` is its
        prefill cost over its bytes, 1 for a full page at the head of a prompt; `lineage` the fewest bits of what it was
        made from."""
        assert self.ref[page] > 0, f"page {page} is named while nobody holds it"
        self.owner[page] = uid
        self._content[page], self._gain[page] = content, gain
        self.lineage[page] = lineage

    def adopt(self, page: int, users: Iterable[int]) -> None:
        """A page in use holds what these sessions have used before."""
        others = {*users} - {int(self.tag[page])}
        if others:
            known = self.users.setdefault(page, set())
            known |= others if len(known) + len(others) <= MAX_USERS else {0}

    def standing(self, page: int) -> tuple[int, float, float]:
        """Of a cached page: its group, when it was let go, its gain."""
        return int(self._evictor.group[page]), float(self._evictor.released_s[page]), float(self._gain[page])

    def pin(self, pages: Pages) -> None:
        """Keep what lies in these pages, in use now, before others once they are let go."""
        self._pin[pages] = True

    def unname(self, page: int) -> None:
        """Take the content's name away; a cached page becomes free."""
        if self.owner[page] == 0:
            return
        self.owner[page] = 0
        if self.ref[page] == 0:
            self._evictor.remove(np.array([page], np.int32))
            self._num_cached -= page <= self.total
            self._to_free(np.array([page], np.int32))

    def seal(self, pages: Pages, precision: Precision) -> Pages | None:
        """Let a unit of `precision` take the place of `pages` (all of one unit, named, in use or cached) -> its pages,
        or None and nothing changed: no unit is left, or the content cannot be sealed.

        Names, references, tags and age go over; whoever has the old numbers in a table must take the new ones.
        """
        assert bool((self.owner[pages] != 0).all()), "a page without a name is sealed"
        target = self.units.take(precision)
        if target is None:
            return None
        if not self._contents.seal(pages, target):
            self.units.give(self.units.unit(int(target[0])))
            return None
        for array in (self.ref, self.owner, self.tag, self.lineage, self._content, self._gain, self._pin):
            array[target] = array[pages]
        self._evictor.rename(pages, target)
        for old, new in zip(pages.tolist(), target.tolist(), strict=True):
            if old in self.users:
                self.users[new] = self.users[old]
        self._is_free[target] = False
        idle = self.ref[pages] == 0
        self._num_cached -= len(self._split(pages[idle])[0])
        self.units.hold(self.units.sealed(pages[~idle]), -1)
        self.units.hold(target[~idle], 1)
        self.ref[pages] = 0
        self.owner[pages] = 0
        self._contents.zero(pages)
        self._disown(pages)
        self._to_free(pages)
        return target

    def put_down(self, pages: Pages, tag: int) -> int:
        """Evict those of `pages`, of one path in order, that are idle and only of session `tag` -> how many."""
        gone: list[int] = []
        for page in pages[::-1].tolist():
            uid = int(self.owner[page])
            alone = self.ref[page] == 0 and self.tag[page] == tag and not self.users.get(page)
            if uid and alone and self._chains.is_leaf(uid):
                self._evictor.remove(np.array([page], np.int32))
                self._gone(page)
                gone.append(page)
        if self.below is not None:
            self.below.gone()
        went = np.array(gone, np.int32)
        self._num_cached -= len(self._split(went)[0])
        self._evictor.reconsider()
        self._to_free(went)
        return len(gone)

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
        self._evictor.remove(pages)
        self._num_cached -= len(self._split(pages)[0])
        self._to_free(pages)
        self._disown(pages)
        return len(gone), uids

    def check(self) -> None:
        """The books agree with themselves."""
        cached = ((self.ref == 0) & (self.owner != 0))[: self.total + 1]
        guard = (int(self.ref[0]), int(self.owner[0]), bool(self._is_free[0]))
        assert guard == (0, 0, False), "the guard page was given out"
        assert int(self.ref.min()) >= 0, "a reference too few"
        assert self._num_free == int(self._is_free[: self.total + 1].sum()), "free pages miscounted"
        assert self._num_cached == int(cached.sum()), "cached pages miscounted"
        assert not bool((self._is_free & ((self.ref != 0) | (self.owner != 0))).any()), "a free page is held or named"
        self._evictor.check()
        assert len(self._evictor) == int(((self.ref == 0) & (self.owner != 0)).sum()), "the evictor misses a page"
        in_use = int((self.ref[: self.total + 1] > 0).sum())
        assert self._num_free + self._num_cached + in_use == self.total, "a page was lost"
        assert self.free >= 0, "units and pages take more than there is"
        self.units.check(self.ref, self._is_free)
        named = self.owner[self.owner != 0]
        assert len(np.unique(named)) == len(named), "two pages under one name"

    def _to_free(self, pages: Pages) -> None:
        if not len(pages):
            return
        self._is_free[pages] = True
        full, sealed = self._split(pages)
        self._num_free += len(full)
        for unit in np.unique((sealed - self.total - 1) // self.units.pages_per_unit).tolist() if len(sealed) else ():
            if bool(self._is_free[self.units.pages(unit)].all()):
                self.units.give(unit)
                self._disown(self.units.pages(unit))
                full = np.concatenate((full, self.units.pages(unit)))
        self._contents.freed(full)

    def _split(self, pages: Pages) -> tuple[Pages, Pages]:
        """Full pages, and pages of units."""
        is_full = pages <= self.total
        return (pages, NO_PAGES) if bool(is_full.all()) else (pages[is_full], pages[~is_full])

    def _disown(self, pages: Pages) -> None:
        self.tag[pages] = 0
        self._pin[pages] = False
        if self.users:
            for page in pages.tolist():
                self.users.pop(page, None)

    def _evict(self, count: int) -> None:
        """Free `count` cached pages."""
        pages = np.array(self._evictor.evict(count, self._clock(), self._gone), np.int32)
        assert len(pages) == count, "the evictor misses a page"
        if self.below is not None:
            self.below.gone()
        self._num_cached -= len(self._split(pages)[0])
        self.evictions += count
        self._to_free(pages)

    def _gone(self, page: int) -> None:
        if self.below is not None:
            self.below.going(page)
        uid = int(self.owner[page])
        self.owner[page] = 0
        self._chains.drop(uid)
