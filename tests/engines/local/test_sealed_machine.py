"""Pool, index and units against the naive oracle of test_pool_machine, with units that go to fewer bits in between.

The oracle knows two things more: what each sealed page says (its path, as before), and of each block the fewest bits of
what its tokens were computed from.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from engines.kv_log import KvLog
from engines.local.kv.cache import KVCache
from engines.local.kv.eviction import Lru
from engines.local.kv.pool import Pages
from engines.local.kv.precision import Precision
from engines.local.kv.units import Units
from engines.local.sequence import Sequence
from tests.engines.local.test_pool_machine import BLOCK, PAGES, Contents, PoolMachine

EACH = 2  # pages a unit
SIZES = {Precision.INT8: 90, Precision.INT4: 60}  # bytes of a unit; a page has 100


class SealedContents(Contents):
    def __init__(self, units: Units) -> None:
        super().__init__()
        self.slots = [[None] * BLOCK for _ in range(units.num_ids)]
        self.held = True  # whether contents fit a codec

    def seal(self, source: Pages, target: Pages) -> bool:
        assert len(source) == len(target) == EACH
        assert min(target.tolist()) > PAGES
        if self.held:
            for one, other in zip(source.tolist(), target.tolist(), strict=True):
                assert self.slots[other] == [None] * BLOCK, "a unit in use is written"
                self.slots[other] = list(self.slots[one])
        return self.held


class SealedMachine(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.units = Units(PAGES, EACH, 100, SIZES)
        self.contents: SealedContents = SealedContents(self.units)
        self.log = KvLog(BLOCK)
        self.cache = KVCache(
            PAGES, BLOCK, self.contents, model="m", policy=Lru(), log=self.log, units=self.units, clock=lambda: 0.0
        )
        self.made_from: dict[int, int] = {}  # uid -> the fewest bits of what the block was computed from

    def _write(self, seq: Sequence, upto: int) -> None:
        before = len(seq.uids)
        touched = seq.table[seq.written // BLOCK :] if upto > seq.written else ()
        assert all(page <= PAGES for page in touched), "a sealed page is written"
        bits = [int(self.units.bits[page]) for page in seq.table]
        bits += [self.made_from.get(uid, 16) for uid in seq.uids]
        super()._write(seq, upto)
        for uid in seq.uids[before:]:
            self.made_from.setdefault(uid, min(bits, default=16))

    @rule(which=st.integers(0, 99), unit=st.integers(0, 2), precision=st.sampled_from(list(SIZES)), held=st.booleans())
    def seal(self, which: int, unit: int, precision: Precision, held: bool) -> None:
        """A unit of anybody's path, running or kept."""
        paths = [list(seq.uids) for seq in self.running] + [blocks.uids.tolist() for _, blocks, _ in self.kept]
        if not paths:
            return
        uids = np.array(paths[which % len(paths)][unit * EACH : (unit + 1) * EACH], np.int64)
        pages = self.cache.pages_of(uids)
        if len(pages) < EACH or not pages.all() or bool((self.units.bits[pages] <= precision).any()):
            return
        sealed_already = pages > PAGES
        if sealed_already.any() and not (
            sealed_already.all() and self.units.unit(pages[0]) == self.units.unit(pages[1])
        ):
            return
        self.contents.held = held
        pool = self.cache.pool
        before = (pool.used, pool.free, self.units.nbytes)
        sealed = self.cache.seal(pages, precision, self.running)
        choosy = any(seq.min_bits > precision and set(seq.table) & set(pages.tolist()) for seq in self.running)
        if not held or choosy:
            assert sealed is None
            assert (pool.used, pool.free, self.units.nbytes) == before
            return
        assert sealed is not None
        assert set(self.units.bits[sealed].tolist()) == {int(precision)}
        assert pool.free >= before[1], "sealing made less room"
        assert pool.used <= before[0]

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 2), more=st.lists(st.integers(0, 1), max_size=6), min_bits=st.sampled_from([6, 8, 16]))
    def come_back_choosy(self, which: int, more: list[int], min_bits: int) -> None:
        """A kept path goes on, and wants its K/V to be of so many bits."""
        former, blocks, written = self.kept[-1 - which % len(self.kept)]
        ids = [*former.tokens.tolist(), *more]
        seq = self._sequence(ids, former.salt, former.tag)
        seq.hint, seq.hint_len, seq.min_bits = blocks, min(written, len(ids)), min_bits
        self._admit(seq, 99)

    @rule(tag=st.integers(1, 2))
    def forget(self, tag: int) -> None:
        self.cache.forget(tag)
        held = {page for seq in self.running for page in seq.table}
        for page in np.flatnonzero(self.cache.pool.tag == tag).tolist():
            assert page in held, "an idle page still bears a forgotten tag"

    @invariant()
    def books_agree(self) -> None:
        pool = self.cache.pool
        self.cache.check(self.running)
        assert pool.free + pool.cached + pool.used == PAGES
        assert pool.free >= 0
        full = int((~pool._is_free[1 : PAGES + 1]).sum())
        assert full * 100 + self.units.nbytes <= PAGES * 100, "more bytes than there are"

    @invariant()
    def nobody_has_what_is_not_good_enough_and_lineage_tells_the_least(self) -> None:
        pool = self.cache.pool
        for seq in self.running:
            pages, uids = seq.table[: len(seq.uids)], list(seq.uids)
            assert all(int(self.units.bits[page]) >= seq.min_bits for page in pages)
            assert all(self.made_from.get(uid, 16) >= seq.min_bits for uid in uids)
            assert seq.lineage <= min((int(self.units.bits[page]) for page in pages), default=16)
        for uid, bits in self.made_from.items():
            node = self.cache.index.located(uid)
            if node is not None:
                assert int(pool.lineage[node.page]) <= bits, "a block claims better ancestors than it had"


SealedMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestSealedMachine = SealedMachine.TestCase


def test_a_pool_of_sealed_units_holds_more_than_its_pages_and_gives_all_back() -> None:
    machine = SealedMachine()
    tokens = 8
    for n in range(12):  # 24 pages' worth on 10 pages
        path = [n >> bit & 1 for bit in range(4)] * 2
        machine.come(path, "a", 1, 99)
        machine._write(machine.running[0], tokens)
        machine.leave(0, True, False)
        machine.seal(len(machine.kept) - 1, 0, Precision.INT4, True)
        machine.books_agree()
    resident = sum(bool(machine.cache.pages_of(blocks.uids).all()) for _, blocks, _ in machine.kept)
    assert resident == 12
    machine.forget(1)
    assert machine.cache.pool.free == PAGES
    assert machine.units.nbytes == 0
