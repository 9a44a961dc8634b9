"""Pool and prefix index against a naive oracle, over random lives of requests: come, go on, keep, leave, forget.

The oracle is the contents: every page holds the (salt, ids) path that was written into its slots. A match that hands
out a page whose slots say anything else is wrong, whatever the books claim. What was copied to another position, or
computed on such, says SHIFTED before its path.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import count

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.contract import Sampling
from engines.kv_log import KvLog
from engines.kv_stream import ResidentBlocks
from engines.local.kv.cache import KVCache
from engines.local.kv.cost_aware import CostAware
from engines.local.kv.history import History
from engines.local.kv.pool import Pages, Slots
from engines.local.kv.session_cache import KeptBlocks
from engines.local.kv.shift import Moved
from engines.local.sequence import Sequence
from tests.engines.local.resident import resident

BLOCK, PAGES = 4, 10
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
MORE = st.lists(st.integers(0, 1), max_size=6)
WRITE = st.sampled_from([99, 99, 3])  # tokens of the first prefill
SHIFTED = "shifted "
Slot = tuple[str, tuple[int, ...]] | None  # salt and the whole path up to this token


class Contents:
    """What the tensors would hold: per page and slot, the path whose K/V was written there."""

    def __init__(self) -> None:
        self.slots: list[list[Slot]] = [[None] * BLOCK for _ in range(PAGES + 1)]

    def freed(self, pages: Pages) -> None:
        self.zero(pages)

    def allocated(self, pages: Pages) -> None:
        pass

    def zero(self, pages: Pages) -> None:
        for page in pages.tolist():
            self.slots[page] = [None] * BLOCK

    def copy(self, source: int, target: int, num_slots: int) -> None:
        self.slots[target][:num_slots] = self.slots[source][:num_slots]

    def move(self, source: Slots, target: Slots, old: int, new: int) -> None:
        for place, (one, other) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            held = self.slots[one // BLOCK][one % BLOCK]
            assert held is not None
            assert not held[0].startswith(SHIFTED), "copied from a copy"
            assert len(held[1]) == old + place + 1, "copied from another position than it says"
            assert other % BLOCK == (new + place) % BLOCK
            self.slots[other // BLOCK][other % BLOCK] = (SHIFTED + held[0], held[1])


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.contents = Contents()
        self.log = KvLog(BLOCK)
        self.clock = count(1.0, 20.0).__next__
        policy = CostAware(history=History(16))
        self.cache = KVCache(
            PAGES, BLOCK, self.contents, model="m", policy=policy, clock=self.clock, log=self.log, pin_share=0.3
        )
        self.told = ResidentBlocks()
        self.running: list[Sequence] = []
        self.kept: list[tuple[Sequence, KeptBlocks, int]] = []  # who left, where it lay, how much was written
        self.numbers = count()

    def _sequence(self, ids: list[int], salt: str, tag: int) -> Sequence:
        number = next(self.numbers)
        return Sequence(str(number), array("I", ids), len(ids), Sampling(1), salt, 0, number, 0.0, tag=tag)

    def _admit(self, seq: Sequence, write: int) -> None:
        if len(self.running) > 3:
            self.leave(0, bool(seq.arrival % 3), False)
        before = (self.cache.pool.free, self.cache.pool.cached)
        match = self.cache.match(seq)
        needed = -(-len(seq.tokens) // BLOCK)
        if self.cache.admit(seq, match):
            assert seq.written < len(seq.tokens)
            self._read(seq)
            self.running.append(seq)
            self._write(seq, min(seq.written + write, len(seq.tokens)))
        else:
            assert (self.cache.pool.free, self.cache.pool.cached) == before
            assert self.cache.pool.used + needed > PAGES, "refused although it fits"
            self.cache.release(seq)

    def _read(self, seq: Sequence) -> None:
        """Everything that counts as written says this very path; of what was copied, the token at least is right."""
        for at in range(seq.written):
            held = self.contents.slots[seq.table[at // BLOCK]][at % BLOCK]
            if at < seq.exact:
                assert held == (seq.salt, tuple(seq.tokens[: at + 1]))
            else:
                assert held is not None
                assert (held[0], held[1][-1]) == (SHIFTED + seq.salt, seq.tokens[at])

    def _write(self, seq: Sequence, upto: int) -> None:
        holders = Counter(page for other in self.running for page in other.table)
        while (stop := min(upto, seq.run_stop)) > seq.written:
            for at in range(seq.written, stop):
                page = seq.table[at // BLOCK]
                assert holders[page] == 1, "a shared page is written"
                salt = SHIFTED + seq.salt if seq.ahead_stop and at >= seq.ahead_stop else seq.salt
                self.contents.slots[page][at % BLOCK] = (salt, tuple(seq.tokens[: at + 1]))
            self.cache.advance(seq, stop - seq.written)

    @rule(ids=IDS, salt=st.sampled_from("aaab"), tag=st.integers(0, 2), write=WRITE)
    def come(self, ids: list[int], salt: str, tag: int, write: int) -> None:
        self._admit(self._sequence(ids, salt, tag), write)

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 2), cut=st.sampled_from([0, 0, 1, 2, 3, 5]), more=MORE, write=WRITE)
    def come_back(self, which: int, cut: int, more: list[int], write: int) -> None:
        """A kept path goes on, or is left `cut` ids before its end."""
        former, blocks, written = self.kept[-1 - which % len(self.kept)]
        ids = [*former.tokens[: max(len(former.tokens) - cut, 1)], *more]
        seq = self._sequence(ids, former.salt, former.tag)
        seq.hint, seq.hint_len = blocks, min(written, len(former.tokens) - cut if cut else len(former.tokens))
        seq.hint_len = max(min(seq.hint_len, len(ids)), 0)
        self._admit(seq, write)

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 2), cut=st.integers(1, 5), more=MORE, busy=st.booleans())
    def branch_and_go_on(self, which: int, cut: int, more: list[int], busy: bool) -> None:
        """A path is left before its end, then continued as if nobody had left it, by one or two at a time."""
        kept = self.kept[-1 - which % len(self.kept)]
        for ids_cut, ids_more in ((0, more), (cut, [*more, 1]), (0, [])) if busy else ((cut, more), (0, [])):
            self.kept.append(kept)
            self.come_back(0, ids_cut, ids_more, 99)
            self.kept.remove(kept)

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 2), before=IDS, source=st.integers(0, 9), recompute=st.integers(0, 2), more=MORE)
    def come_back_cut(self, which: int, before: list[int], source: int, recompute: int, more: list[int]) -> None:
        """What a path holds from `source` on comes after something else, and may be copied from where it was."""
        former, blocks, _ = self.kept[-1 - which % len(self.kept)]
        moving = former.tokens[source:].tolist()
        if not moving:
            return
        seq = self._sequence([*before, *moving, *more], former.salt, former.tag)
        seq.moved = Moved(blocks, source, len(before), len(moving), recompute)
        self._admit(seq, 99)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), tokens=st.integers(1, 9))
    def prefill(self, which: int, tokens: int) -> None:
        seq = self.running[which % len(self.running)]
        self._write(seq, min(seq.written + tokens, len(seq.tokens)))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99))
    def catch_up(self, which: int) -> None:
        """Blocks that others wrote since: never fewer tokens written than before, and one is left to run."""
        seq = self.running[which % len(self.running)]
        if len(seq.tokens) - seq.written < 2:
            return
        before = seq.written
        self.cache.catch_up(seq)
        assert before <= seq.written < len(seq.tokens)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def decode(self, which: int, token: int) -> None:
        seq = self.running[which % len(self.running)]
        if seq.remaining:
            return
        seq.tokens.append(token)
        table = list(seq.table)
        if self.cache.grow(seq, len(seq.tokens)):
            self._write(seq, len(seq.tokens))
        else:
            assert list(seq.table) == table
            seq.tokens.pop()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), keep=st.sampled_from([True, True, False]), scrub=st.booleans())
    def leave(self, which: int, keep: bool, scrub: bool) -> None:
        seq = self.running.pop(which % len(self.running))
        written = seq.written
        if seq.arrival % 4 == 0:
            self.cache.pin(seq)
        if keep:
            self.kept.append((seq, self.cache.keep(seq), written))
            return
        if scrub:
            for page in seq.table[len(seq.uids) :]:
                if self.cache.pool.ref[page] == 1:
                    self.contents.slots[page] = [None] * BLOCK
        self.cache.release(seq, scrub=scrub)

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        _, blocks, _ = self.kept.pop(which % len(self.kept))
        self.cache.drop(blocks)

    @rule(tag=st.integers(1, 2))
    def forget(self, tag: int) -> None:
        free = self.cache.pool.free
        freed = self.cache.forget(tag).blocks
        assert self.cache.pool.free == free + freed
        held = {page for seq in self.running for page in seq.table}
        for page in np.flatnonzero(self.cache.pool.tag == tag).tolist():
            assert page in held, "an idle page still bears a forgotten tag"

    @invariant()
    def books_agree(self) -> None:
        pool = self.cache.pool
        self.cache.check(self.running)
        assert pool.free + pool.cached + pool.used == PAGES
        held = Counter(page for seq in self.running for page in seq.table)
        assert pool.used == len(held)
        assert all(pool.ref[page] == times for page, times in held.items())

    @invariant()
    def the_events_add_up_to_what_the_pool_holds(self) -> None:
        for event in self.log.drain():
            self.told.apply(event)
        assert resident(self.told, "m") == resident(self.cache.index, "m")

    @invariant()
    def everybody_can_read_what_is_theirs(self) -> None:
        for seq in self.running:
            self._read(seq)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_when_all_have_gone_and_all_is_forgotten_the_pool_is_free_and_the_index_empty() -> None:
    machine = PoolMachine()
    for n in range(6):
        machine.come([n % 2] * (n + 3), "a", 1, 0)
    for seq in machine.running:
        machine._write(seq, len(seq.tokens))
    while machine.running:
        machine.leave(0, True, False)
    machine.forget(1)
    assert machine.cache.pool.free == PAGES
    assert len(machine.cache.index) == 0


def test_a_branch_inside_the_tail_leaves_the_tail_as_it_was() -> None:
    machine = PoolMachine()
    machine.come([0] * 7, "a", 0, 99)
    machine.leave(0, True, False)
    machine.come_back(0, 2, [1, 1], 99)
    machine.come_back(0, 0, [1], 99)
    assert [seq.cached_tokens or seq.written for seq in machine.running] == [7, 8]


def test_a_tail_that_somebody_goes_on_in_is_copied() -> None:
    machine = PoolMachine()
    machine.come([0] * 5, "a", 0, 99)
    machine.leave(0, True, False)
    machine.come_back(0, 0, [1], 99)
    machine.come_back(0, 0, [0, 0], 99)
    one, two = machine.running
    assert one.table[0] == two.table[0]
    assert one.table[1] != two.table[1]


def test_a_block_that_was_evicted_is_not_copied_from() -> None:
    machine = PoolMachine()
    machine.come([0] * 12, "a", 0, 99)
    machine.leave(0, True, False)
    kept = machine.kept[0]
    machine.come([1] * (4 * PAGES - 8), "b", 0, 99)  # leaves two pages: the path's first
    machine.leave(0, False, False)
    machine.kept.append(kept)
    machine.come_back(0, 2, [], 3)
    assert machine.running[0].table
    machine.everybody_can_read_what_is_theirs()
