"""A model is asked at load which codecs it bears; what it does not bear is replaced by the next better one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bench.quant_broken import DROPPED_ZERO
from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.kv.precision import Precision
from engines.local.kv.quant import Codec
from engines.local.self_check import PAST, SCORED, self_check, text_ids, wanted_by
from tests.engines.local.test_sealing import HALF
from tests.engines.local.tiny import VOCAB, Answers, request, tiny_loaded

IDS = torch.randint(0, VOCAB, (PAST + SCORED,), generator=torch.Generator().manual_seed(6)).tolist()


def _codecs(**named: Codec) -> Mapping[str, Codec]:
    return {"int8": HALF, "k8v4": HALF, "int4": HALF, **named}


def test_a_codec_that_loses_too_much_is_refused_with_the_numbers_and_others_stay() -> None:
    config = EngineConfig(block_size=16, kv_precision="auto")
    borne = self_check(tiny_loaded(), config, IDS, codecs=lambda _: _codecs(int4=DROPPED_ZERO, k8v4=DROPPED_ZERO))
    assert borne.usable == {Precision.INT8}
    assert borne.kl[Precision.INT8] < 1e-4
    assert borne.refused[Precision.INT4].startswith("KL ")
    assert borne.refused[Precision.INT4].endswith("over a text of 480 tokens, at most 3e-02")


def test_where_4_bits_are_refused_keys_of_8_are_tried() -> None:
    config = EngineConfig(block_size=16, kv_precision="int4")
    borne = self_check(tiny_loaded(), config, IDS, codecs=lambda _: _codecs(int4=DROPPED_ZERO))
    assert (borne.usable, set(borne.refused)) == ({Precision.K8V4}, {Precision.INT4})
    worse = self_check(tiny_loaded(), config, IDS, codecs=lambda _: dict.fromkeys(_codecs(), DROPPED_ZERO))
    assert (worse.usable, set(worse.refused)) == (set(), {Precision.INT4, Precision.K8V4, Precision.INT8})


def test_the_next_better_codec_takes_the_place_of_one_that_is_not_borne() -> None:
    model = tiny_loaded()
    config = EngineConfig(block_size=16, kv_precision="int4", pool_bytes=60 * 16 * model.kv_bytes_per_token)
    engine = LocalEngine(model, config, iter(range(10**6)).__next__, usable=frozenset({Precision.INT8}))
    Answers(engine).run(request("a", IDS[:400], 4, session="s"))
    assert engine.stats().sealed == {"int8": 4}


def test_only_what_the_policy_may_ask_for_is_checked() -> None:
    assert wanted_by("full") == ()
    assert wanted_by("int8") == (Precision.INT8,)
    assert wanted_by("seed") == (Precision.INT8, Precision.INT4)
    assert wanted_by("auto") == (Precision.INT8, Precision.K8V4, Precision.INT4)
    assert text_ids(tiny_loaded()) == []
