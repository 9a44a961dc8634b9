"""The whole engine on the kernels, and which attention a device gets."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engines.local.config import EngineConfig
from engines.local.kernels import path
from engines.local.kernels.path import AttentionPath, DeviceRun, choose_attention
from engines.local.kv.shapes import LayerShape
from tests.engines.local.tiny import VOCAB, Answers, TinyModel, request, tiny_engine

pytest.importorskip("triton")

from engines.local.kernels.graphs import DecodeGraphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = {0: LayerShape(2, 64, 64)}
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")


def _ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@interpreted
def test_the_engine_on_kernels_answers_as_the_model_does_batched_chunked_and_from_cache() -> None:
    module = TinyModel()
    engine = tiny_engine(40, module=module, kernels="triton", max_batch_tokens=48, block_size=32)
    assert engine.attention.name == "triton"
    shared = _ids(32, 1)
    prompts = [shared + _ids(7, 2), shared + _ids(20, 3), _ids(3, 4)]
    for turn in ("first", "again"):
        answers = Answers(engine).run(*(request(f"{turn}{i}", ids, 3) for i, ids in enumerate(prompts)))
        for i, ids in enumerate(prompts):
            assert answers.ids[f"{turn}{i}"] == module.greedy(ids, 3)
    assert sum(answers.cached.values()) == 32 + 32


@interpreted
def test_steps_that_only_decode_run_from_static_buffers_with_padding_and_say_the_same() -> None:
    module = TinyModel()
    engine = tiny_engine(40, module=module, kernels="triton", cuda_graphs=True, block_size=32)
    prompts = [_ids(3, 4), _ids(30, 7), _ids(35, 8)]
    answers = Answers(engine).run(*(request(str(i), ids, 2 + i) for i, ids in enumerate(prompts)))
    for i, ids in enumerate(prompts):
        assert answers.ids[str(i)] == module.greedy(ids, 2 + i)
    graphs = engine._runner._graphs
    assert isinstance(graphs, DecodeGraphs)
    assert sorted(bucket for bucket, _ in graphs.recorded) == [1, 2, 4]
    assert not bool(engine._runner._storage.keys[0][0].any()), "padding was written"


@interpreted
def test_a_model_that_cannot_be_recorded_runs_as_before_and_graphs_are_refused_without_kernels() -> None:
    engine = tiny_engine(40, module=(module := TinyModel()), kernels="triton", cuda_graphs=True, block_size=32)
    graphs = engine._runner._graphs
    assert isinstance(graphs, DecodeGraphs)

    def no_recording(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs.record = no_recording
    assert Answers(engine).run(request("r", _ids(3, 4), 3)).ids["r"] == module.greedy(_ids(3, 4), 3)
    assert graphs.refused == "operation not permitted when stream is capturing"
    with pytest.raises(ValueError, match="cuda_graphs needs kernels triton"):
        tiny_engine(8, cuda_graphs=True)


@interpreted
def test_over_sealed_blocks_kernels_and_torch_say_the_same() -> None:
    told, policy = [], "int4"
    for kernels in ("torch", "triton"):
        engine = tiny_engine(40, kernels=kernels, kv_precision=policy, block_size=64)
        answers = Answers(engine).run(request("first", ids := _ids(200, 5), 1, session="s"))
        assert engine.stats().sealed[policy] == 1
        answers.run(request("then", [*ids, *answers.ids["first"], *_ids(9, 6)], 3, session="s"))
        assert answers.cached["then"] >= 200
        told.append(answers.ids)
    assert told[0] == told[1]


def test_a_cpu_attends_in_torch_and_a_gpu_in_triton_where_the_kernels_take_its_heads() -> None:
    assert choose_attention("auto", CPU, torch.float32, SHAPES).name == "torch"
    assert choose_attention("auto", CUDA, torch.float32, SHAPES).name == "triton"
    odd = choose_attention("auto", CUDA, torch.float32, SHAPES | {1: LayerShape(2, 63, 64)})
    assert (odd.name, "63 channels" in odd.why) == ("torch", True)
    wide = {0: LayerShape(2, 256, 256)}
    assert [choose_attention("auto", CUDA, dtype, wide).name for dtype in (torch.float16, torch.float32)] == [
        "triton",
        "torch",
    ]
    with pytest.raises(ValueError, match="512 channels"):
        choose_attention("triton", CUDA, torch.float32, {0: LayerShape(2, 512, 512)})
    with pytest.raises(ValueError, match="kernels is 'flash'"):
        EngineConfig(kernels="flash")


@interpreted
def test_the_interpreter_is_refused_what_it_multiplies_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        choose_attention("triton", CPU, torch.bfloat16, SHAPES)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="only interprets"):
        choose_attention("triton", CPU, torch.float32, SHAPES)


def test_health_says_that_a_path_has_not_run_on_a_device_until_a_run_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attending = AttentionPath("triton", "the device is cuda", "cuda")
    monkeypatch.setattr(path, "DEVICE_RUNS", ())
    assert attending.report()["note"] == "not yet run on a device"
    assert AttentionPath("torch", "a head of 63 channels", "cuda").report()["note"] == "not yet run on a device"
    monkeypatch.setattr(path, "DEVICE_RUNS", (DeviceRun("NVIDIA X", "2027-01-01", "3.7.1", "gpu.json"),))
    assert attending.report() == {"path": "triton", "why": "the device is cuda", "ran_on": ["NVIDIA X"]}
    assert AttentionPath("torch", "the device is cpu").report() == {
        "path": "torch", "why": "the device is cpu", "ran_on": ["cpu", "NVIDIA X"]
    }  # fmt: skip
