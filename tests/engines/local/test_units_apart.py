"""Sealed units with memory of their own, as a GPU's pool has them: full pages and units do not take from each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.fit import SEALED_SHARE
from engines.local.kv.precision import SEALED, Precision
from engines.local.kv.quant import codecs
from engines.local.kv.shapes import LayerShape
from engines.local.kv.units import Units
from engines.local.sizing import pool_pages, pool_units
from tests.engines.local.tiny import Answers, TinyModel, request, tiny_engine, tiny_loaded

SIZES = {Precision.INT8: 90, Precision.INT4: 60}


def test_units_take_nothing_from_the_full_pages_and_no_more_than_is_theirs() -> None:
    units = Units(10, 2, 100, SIZES, {Precision.INT8: 200, Precision.INT4: 60})
    assert units.count == {Precision.INT8: 2, Precision.INT4: 1}
    assert units.take(Precision.INT8) is not None
    taken = units.take(Precision.INT8)
    assert taken is not None
    assert units.take(Precision.INT8) is None
    assert (units.nbytes, units.ballast, units.own_bytes) == (180, 0, 260)
    units.give(units.unit(int(taken[0])))
    assert units.take(Precision.INT8) is not None
    assert units.ballast_held(np.empty(0, np.int32)) == 0


@pytest.mark.parametrize(
    ("policy", "usable", "held"),
    [
        ("int4", set(SEALED), {Precision.INT4}),
        ("int4", {Precision.INT8}, {Precision.INT8}),  # the next better one takes its place
        ("seed", set(SEALED), {Precision.INT8, Precision.INT4}),
        ("full", set(SEALED), set()),
    ],
)
def test_a_gpus_pool_is_shared_out_among_what_the_policy_asks_for(
    policy: str, usable: set[Precision], held: set[Precision]
) -> None:
    shapes = {layer: LayerShape(8, 128, 128) for layer in range(4)}
    model = replace(tiny_loaded(), shapes=shapes, dtype=torch.bfloat16, device=torch.device("cuda"), window=1 << 20)
    config = EngineConfig(pool_bytes=256 << 20, kv_precision=policy)
    pages = pool_pages(config, model)
    units = pool_units(config, model, pages, codecs, usable)
    assert set(units.count) == held
    full = pages * config.block_size * model.kv_bytes_per_token
    assert full + units.own_bytes == pytest.approx(256 << 20, rel=0.01)
    assert full == pytest.approx((256 << 20) * (1 - SEALED_SHARE if held else 1), rel=0.01)


def test_an_engine_goes_on_when_the_units_room_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tiny_engine(40, module=TinyModel(), kv_precision="int8", block_size=16)
    given = shared._cache.pool.units
    unit = int(given._nbytes[0])
    two = Units(40, 4, given.page_bytes, {Precision.INT8: unit}, {Precision.INT8: 2 * unit})
    monkeypatch.setattr("engines.local.engine.pool_units", lambda *_: two)
    answers = Answers(LocalEngine(shared.model, shared.config, shared.clock))
    path: list[int] = []
    for turn in range(4):
        path += [(7 * turn + i) % 64 for i in range(120)]
        answers.run(request(f"t{turn}", path, 4, session="s"))
        path += answers.ids[f"t{turn}"]
    stats = answers.engine.stats()
    assert stats.sealed == {"int8": 2}
    assert stats.sealed_bytes <= stats.pool_bytes
