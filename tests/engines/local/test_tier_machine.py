"""Pool, index and host tier against the naive oracle of test_pool_machine: what comes up from below says its path."""

from __future__ import annotations

from itertools import count

import numpy as np
import orjson
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from torch import Tensor

from engines.kv_log import CPU, KvLog
from engines.kv_stream import ResidentBlocks
from engines.local.kv.cache import KVCache
from engines.local.kv.cost_aware import CostAware
from engines.local.kv.history import History
from engines.local.kv.pool import Pages
from engines.local.kv.precision import Precision
from engines.local.kv.tiers.host import PAGE, HostTier
from engines.local.kv.tiers.tiers import Tiers
from tests.engines.local.resident import resident
from tests.engines.local.test_pool_machine import BLOCK, PAGES, Contents, PoolMachine

ROOM = 7  # pieces that the host holds


class PackedContents(Contents):
    """A page is packed as what its slots say, as JSON, filled up with blanks."""

    def pack(self, pages: Pages) -> Tensor:
        packed = torch.full((len(pages), PAGE), ord(" "), dtype=torch.uint8)
        for row, page in zip(packed, pages.tolist(), strict=True):
            spelled = orjson.dumps(self.slots[page])
            row[: len(spelled)] = torch.frombuffer(bytearray(spelled), dtype=torch.uint8)
        return packed

    def unpack(self, packed: Tensor, pages: Pages) -> None:
        for row, page in zip(packed, pages.tolist(), strict=True):
            told = orjson.loads(row.numpy().tobytes())
            self.slots[page] = [(slot[0], tuple(slot[1])) if slot is not None else None for slot in told]

    def blank(self, packed: Tensor, num_slots: int) -> None:
        told = orjson.loads(packed.numpy().tobytes())
        spelled = orjson.dumps([*told[:num_slots], *(None for _ in told[num_slots:])])
        packed[:] = ord(" ")
        packed[: len(spelled)] = torch.frombuffer(bytearray(spelled), dtype=torch.uint8)


class TierMachine(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.contents: PackedContents = PackedContents()
        self.log = KvLog(BLOCK)
        self.clock = count(1.0, 20.0).__next__
        policy = CostAware(history=History(16))
        self.host = HostTier(ROOM * PAGE, {Precision.FULL: PAGE}, policy, clock=self.clock, log=self.log)
        self.tiers = Tiers(self.host, self.contents)
        self.cache = KVCache(
            PAGES,
            BLOCK,
            self.contents,
            model="m",
            policy=policy,
            clock=self.clock,
            log=self.log,
            pin_share=0.3,
            tiers=self.tiers,
        )

    @rule(which=st.integers(0, 99))
    def damage(self, which: int) -> None:
        """A bit of something in host memory flips."""
        pieces = list(self.host.pieces())
        if pieces:
            self.host.content(pieces[which % len(pieces)])[which % PAGE] ^= 1

    @rule(tag=st.integers(1, 2))
    def forget(self, tag: int) -> None:
        free, below = self.cache.pool.free, self.host.blocks
        freed = self.cache.forget(tag).blocks
        assert self.cache.pool.free - free + below - self.host.blocks == freed
        held = {page for seq in self.running for page in seq.table}
        for page in np.flatnonzero(self.cache.pool.tag == tag).tolist():
            assert page in held, "an idle page still bears a forgotten tag"
        assert not any(tag in piece.users for piece in self.host.pieces()), "a forgotten session lies below"

    @invariant()
    def names_below_are_those_of_their_ids(self) -> None:
        assert all(piece.named_right() for piece in self.host.pieces())

    @invariant()
    def the_events_add_up_to_what_the_pool_holds(self) -> None:
        for event in self.log.drain():
            self.told.apply(event)
        assert resident(self.told, "m") == resident(self.cache.index, "m")
        full = {piece.name: piece.token_bytes for piece in self.host.pieces() if not piece.partial}
        assert resident(self.told, "m", CPU) == full


TierMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestTierMachine = TierMachine.TestCase


def test_when_all_is_forgotten_host_memory_is_zero() -> None:
    machine = TierMachine()
    told = ResidentBlocks()
    for n in range(8):
        machine.come([n % 2, *[n // 2 % 2] * (n + 8)], "a", 1, 99)
        machine.leave(0, True, False)
    for event in machine.log.drain():
        told.apply(event)
    assert len(machine.host)
    assert told.tier(CPU)
    contents = [machine.host.content(piece) for piece in machine.host.pieces()]
    machine.forget(1)
    assert not len(machine.host)
    assert not machine.host.nbytes
    assert not any(bool(content.any()) for content in contents)
