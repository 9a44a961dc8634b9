"""Sealed units go down and come up as they are, in memory, in files and in a session's file: encoded once."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from torch import Tensor

from engines.kv_log import CPU, KvLog
from engines.local.kv.cache import KVCache
from engines.local.kv.eviction import Lru
from engines.local.kv.precision import Precision
from engines.local.kv.tiers.host import PAGE, HostTier
from engines.local.kv.tiers.tiers import Tiers
from engines.local.kv.units import Units
from tests.engines.local.resident import resident
from tests.engines.local.test_disk_tier import closing, disk_of, settle
from tests.engines.local.test_pool_machine import BLOCK, PAGES
from tests.engines.local.test_sealed_machine import SIZES, SealedContents, SealedMachine
from tests.engines.local.test_sessions_core import Talk, ids
from tests.engines.local.test_suspension import ask
from tests.engines.local.test_tier_machine import PackedContents
from tests.engines.local.tiny import Answers, TinyModel, request, tiny_engine

ROOM = 1 << 20


class PackedUnits(PackedContents, SealedContents):
    def pack_unit(self, page: int) -> Tensor:
        spelled = orjson.dumps([self.slots[one] for one in self._unit(page)])
        packed = torch.full((PAGE,), ord(" "), dtype=torch.uint8)
        packed[: len(spelled)] = torch.frombuffer(bytearray(spelled), dtype=torch.uint8)
        return packed

    def unpack_unit(self, packed: Tensor, page: int) -> None:
        told = orjson.loads(packed.numpy().tobytes())
        for one, slots in zip(self._unit(page), told, strict=True):
            self.slots[one] = [(slot[0], tuple(slot[1])) if slot is not None else None for slot in slots]

    def _unit(self, page: int) -> list[int]:
        return self.units.pages(self.units.unit(page)).tolist()

    def __init__(self, units: Units) -> None:
        SealedContents.__init__(self, units)
        self.units = units


class SealedTierMachine(SealedMachine):
    def __init__(self) -> None:
        super().__init__()
        self.contents: PackedUnits = PackedUnits(self.units)
        self.log = KvLog(BLOCK)
        self.clock = count(1.0, 20.0).__next__
        sizes = dict.fromkeys((Precision.FULL, *SIZES), PAGE)
        self.host = HostTier(7 * PAGE, sizes, Lru(), clock=self.clock, log=self.log)
        self.cache = KVCache(
            PAGES,
            BLOCK,
            self.contents,
            model="m",
            policy=Lru(),
            log=self.log,
            units=self.units,
            clock=self.clock,
            tiers=Tiers(self.host, self.contents),
        )

    @rule(which=st.integers(0, 99))
    def damage(self, which: int) -> None:
        pieces = list(self.host.pieces())
        if pieces:
            self.host.content(pieces[which % len(pieces)])[which % PAGE] ^= 1

    @rule(tag=st.integers(1, 2))
    def forget(self, tag: int) -> None:
        super().forget(tag)
        assert not any(tag in piece.users for piece in self.host.pieces()), "a forgotten session lies below"

    @invariant()
    def the_events_add_up_to_what_the_pool_holds(self) -> None:
        for event in self.log.drain():
            self.told.apply(event)
        assert resident(self.told, "m") == resident(self.cache.index, "m")
        below = {name: ids for piece in self.host.pieces() if not piece.partial for name, _, ids in piece.blocks()}
        assert resident(self.told, "m", CPU) == below


SealedTierMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestSealedTierMachine = SealedTierMachine.TestCase


def _spoken(talk: Talk) -> dict[int, int]:
    """Units of the pool by bits, after the session was left alone."""
    engine = talk.run.engine
    talk.run.engine.submit(request("turn", ids(1, 400), 1, session="s", salt="t"))
    while engine.has_work():
        engine.step()
    return {int(precision): taken for precision, taken in engine._cache.pool.units.taken().items() if taken}


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_a_sealed_path_comes_back_from_host_memory_bit_by_bit(policy: str) -> None:
    engine = tiny_engine(80, host_bytes=ROOM, kv_precision=policy, eviction="lru", debug_nan_fill=False)
    talk = Talk(Answers(engine), "s", salt="t")
    sealed = _spoken(talk)
    assert sum(sealed.values()) >= 4
    path = engine._sessions.get("s", "t")
    assert path is not None
    pages = engine._cache.pages_of(path.blocks.uids)
    storage = engine._runner._storage
    units = [storage.pack_unit(int(page)).clone() for page in pages if page > engine._cache.pool.total]
    for number in range(2):
        Talk(Answers(engine), f"other{number}", salt="t").run.run(request(f"o{number}", ids(9 + number, 560), 1))
    assert not engine._cache.pages_of(path.blocks.uids).any(), "something of it is still on the device"
    engine.check()
    engine.submit(request("back", [*ids(1, 400), 5], 1, session="s", salt="t"))
    started = engine.step()[0].started
    assert started is not None
    assert started.cached_tokens == 400
    while engine.has_work():
        engine.step()
    engine.check()
    path = engine._sessions.get("s", "t")
    assert path is not None
    pages = engine._cache.pages_of(path.blocks.uids)
    back = [storage.pack_unit(int(page)) for page in pages if page > engine._cache.pool.total]
    assert len(back) == len(units)
    assert all(bool((one == other).all()) for one, other in zip(units, back, strict=True)), "it was encoded again"


def test_a_sealed_session_is_suspended_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    options: dict[str, object] = {"kv_precision": "int8", "host_bytes": ROOM, "kv_dir": str(tmp_path)}
    with closing(tiny_engine(80, debug_nan_fill=False, **options)) as engine:
        assert _spoken(Talk(Answers(engine), "s", salt="t"))
        told = ask(engine, "suspend", "s", "t")
        assert told["blocks"] == 50
        assert engine._cache.pool.units.nbytes == 0
        settle(engine)
        precisions = {piece.precision for file in disk_of(engine).catalogue.files.values() for piece in file.pieces}
        assert precisions == {Precision.FULL, Precision.INT8}
    with closing(tiny_engine(80, debug_nan_fill=False, **options)) as engine:
        engine.submit(request("on", [*ids(1, 400), 5], 3, session="s", salt="t"))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        started = next(output.started for output in outputs if output.started is not None)
        assert started.cached_tokens == 400
        assert engine._cache.pool.units.nbytes > 0
        engine.check()


def test_a_request_that_wants_more_bits_does_not_take_what_lies_below() -> None:
    engine = tiny_engine(80, host_bytes=ROOM, kv_precision="int8", eviction="lru", debug_nan_fill=False)
    _spoken(Talk(Answers(engine), "s", salt="t"))
    for number in range(2):
        Answers(engine).run(request(f"o{number}", ids(9 + number, 560), 1))
    asked = replace(request("choosy", [*ids(1, 400), 5], 3, salt="t"), min_bits=16)
    run = Answers(engine)
    engine.submit(asked)
    while engine.has_work():
        run.step()
    assert run.cached["choosy"] <= 64
    assert run.ids["choosy"] == TinyModel().greedy([*ids(1, 400), 5], 3)
