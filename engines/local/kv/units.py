"""The books of sealed units: which ids they have, which are taken, and how many bytes that is. Knows no tensors.

    page ids   | 0 guard | 1 ... N full pages | INT8 units | K8V4 units | INT4 units |
    unit       pages_per_unit ids in a row: the blocks of 64 tokens of one path

There are more ids than bytes: full pages and units of every precision live in one budget, N full pages' bytes. What
the units take is missing among the full pages: `ballast` says how many. A unit is given back when all its pages are.
Where memory cannot be used for one or the other (a GPU's), each precision has bytes of its own, and nothing is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.precision import Precision

Pages = NDArray[np.int32]


class Units:
    def __init__(
        self,
        num_pages: int,
        pages_per_unit: int = 1,
        page_bytes: int = 1,
        unit_bytes: Mapping[Precision, int] | None = None,
        own_bytes: Mapping[Precision, int] | None = None,
    ) -> None:
        """`num_pages` full pages of `page_bytes`; `unit_bytes` by precision that can be sealed to. `own_bytes`: what is
        set apart for the units of each; None: they share the full pages' bytes."""
        self.num_pages, self.pages_per_unit, self.page_bytes = num_pages, pages_per_unit, page_bytes
        self._shared = own_bytes is None
        room = own_bytes or dict.fromkeys(unit_bytes or {}, num_pages * page_bytes)
        self.own_bytes = sum((own_bytes or {}).values())
        self.count = {p: room[p] // nbytes for p, nbytes in (unit_bytes or {}).items()}
        self.first: dict[Precision, int] = {}  # page id of each precision's unit 0
        after = num_pages + 1
        for precision, count in self.count.items():
            self.first[precision] = after
            after += count * pages_per_unit
        self.num_ids = after
        self.bits = np.full(after, Precision.FULL, np.int8)  # by page id
        self._nbytes = np.zeros((after - num_pages - 1) // pages_per_unit, np.int64)  # by unit
        self._taken = np.zeros(len(self._nbytes), np.bool_)
        self._held = np.zeros(len(self._nbytes), np.int32)  # pages with a reference
        self._free: dict[Precision, list[int]] = {}  # units, the lowest last
        for precision, count in self.count.items():
            first = self.unit(self.first[precision])
            self.bits[self.pages(first)[0] : self.pages(first + count)[0]] = precision
            self._nbytes[first : first + count] = (unit_bytes or {})[precision]
            self._free[precision] = list(range(first + count - 1, first - 1, -1))
        self.nbytes = 0  # of the units that are taken

    def unit(self, page: int) -> int:
        return (page - self.num_pages - 1) // self.pages_per_unit

    def pages(self, unit: int) -> Pages:
        first = self.num_pages + 1 + unit * self.pages_per_unit
        return np.arange(first, first + self.pages_per_unit, dtype=np.int32)

    def place(self, page: int) -> tuple[Precision, int, int]:
        """Of a sealed page: its precision, its unit counted from that precision's first, and its place in the unit."""
        precision = Precision(int(self.bits[page]))
        unit, block = divmod(page - self.first[precision], self.pages_per_unit)
        return precision, unit, block

    def sealed(self, pages: Pages) -> Pages:
        return pages[pages > self.num_pages]

    def take(self, precision: Precision) -> Pages | None:
        """A free unit's pages, or None when its ids have run out."""
        if not self._free.get(precision):
            return None
        unit = self._free[precision].pop()
        self._taken[unit] = True
        self.nbytes += int(self._nbytes[unit])
        return self.pages(unit)

    def give(self, unit: int) -> None:
        assert self._taken[unit], "a unit was given back twice"
        assert not self._held[unit], "a unit in use was given back"
        self._taken[unit] = False
        self.nbytes -= int(self._nbytes[unit])
        self._free[Precision(int(self.bits[self.pages(unit)[0]]))].append(unit)

    def hold(self, pages: Pages, step: int) -> None:
        """`pages`, sealed, have got (+1) their first reference or lost (-1) their last."""
        if len(pages):
            np.add.at(self._held, (pages - self.num_pages - 1) // self.pages_per_unit, step)

    @property
    def ballast(self) -> int:
        """Full pages that the units stand in the place of."""
        return -(-self.nbytes // self.page_bytes) if self._shared else 0

    def ballast_held(self, besides: Pages) -> int:
        """The same if all units without a reference were gone, but for those of the sealed pages `besides`."""
        if not self.nbytes or not self._shared:
            return 0
        held = self._held > 0
        held[(besides - self.num_pages - 1) // self.pages_per_unit] = True
        return -(-int(self._nbytes[held & self._taken].sum()) // self.page_bytes)

    def taken(self) -> dict[Precision, int]:
        """Units in the pool, by precision."""
        return {p: count - len(self._free[p]) for p, count in self.count.items()}

    def check(self, ref: NDArray[np.int32], is_free: NDArray[np.bool_]) -> None:
        """`ref` and `is_free` of all page ids, from the pool."""
        if not len(self._nbytes):
            return
        shape = (-1, self.pages_per_unit)
        held = (ref[self.num_pages + 1 :].reshape(shape) > 0).sum(1)
        free = is_free[self.num_pages + 1 :].reshape(shape).all(1)
        assert bool((held == self._held).all()), "references into units miscounted"
        assert bool((free != self._taken).all()), "a unit is taken and has no page, or the other way round"
        assert self.nbytes == int(self._nbytes[self._taken].sum()), "bytes of units miscounted"
