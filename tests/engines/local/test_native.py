"""The compiled decoder gives what transformers' code gives, the same bits beside any batch mates, or says why not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from engines.local.attention import Chunk, KVStep
from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.kv.storage import KVStorage
from engines.local.model import LoadedModel, adopt
from engines.local.native import adopt as adoption
from engines.local.native.adopt import native_decoder
from engines.local.native.build import CannotBuild, native_library
from engines.local.native.decoder import MOST_TOKENS, NativeDecoder, Tokens
from tests.engines.local.test_families import LLAMA3_ROPE, build
from tests.engines.local.tiny import Answers, request, tiny_loaded

PAGE, PAGES = 16, 90
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"max_position_embeddings": 2048}),
    "seven queries a head": (
        "llama",
        {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "biases, llama3 rope": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "odd rows": ("llama", {"vocab_size": 323, "intermediate_size": 144}),
    "mistral with window": ("mistral", {"sliding_window": 24, "max_position_embeddings": 2048}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def loaded(name: str) -> LoadedModel:
    module = build(*SHAPES[name])
    return adopt(module, name=name, decode=lambda ids: " ".join(map(str, ids)))


class Twin:
    """One model, two pools: what transformers' code writes and gives, and what the decoder does."""

    def __init__(self, model: LoadedModel, threads: int = 1) -> None:
        self.model = model
        draw = np.random.default_rng(1)
        self.ids = draw.integers(0, model.vocab_size, 1200)
        self.table = draw.permutation(np.arange(1, PAGES + 1))
        self.pools = [
            KVStorage(model.shapes, PAGES, PAGE, dtype=model.dtype, device=model.device, nan_fill=True) for _ in "ab"
        ]
        for pool in self.pools:
            pool.allocated(self.table.astype(np.int32))
        self.decoder = NativeDecoder(model.module, self.pools[1], model.windows, threads)

    def slots(self, positions: np.ndarray) -> np.ndarray:
        slots: np.ndarray = self.table[positions // PAGE] * PAGE + positions % PAGE
        return slots

    def right(self, start: int, stop: int) -> torch.Tensor:
        span = self.pools[0].span(self.table[: -(-stop // PAGE)], stop)
        positions = np.arange(start, stop)
        step = KVStep(
            self.pools[0], torch.from_numpy(self.slots(positions)), None, (Chunk(0, stop - start, start, span),)
        )
        ids = torch.from_numpy(self.ids[start:stop])
        with torch.inference_mode():
            out = self.model.forward(ids[None], torch.from_numpy(positions)[None], torch.arange(stop - start), step)
        return out[0]

    def got(self, positions: list[int]) -> torch.Tensor:
        at = np.array(positions)
        table = self.table.astype(np.int32)
        return self.decoder.run(
            Tokens(self.ids[at], at, self.slots(at), [table] * len(positions), np.arange(len(positions)))
        )

    def copy(self) -> None:
        for name in ("keys", "values"):
            for layer, pages in getattr(self.pools[0], name).items():
                getattr(self.pools[1], name)[layer].copy_(pages)


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_pages_are_those_of_transformers(name: str) -> None:
    twin = Twin(loaded(name), threads=2)
    right = twin.right(0, 50)
    got = torch.cat([twin.got(list(range(31))), twin.got(list(range(31, 50)))])
    assert float((right - got).abs().max()) < 1e-4 * float(right.abs().max())
    for what in ("keys", "values"):
        for layer, pages in getattr(twin.pools[0], what).items():
            other = getattr(twin.pools[1], what)[layer]
            assert float((pages - other).nan_to_num().abs().max()) < 1e-4 * float(pages.nan_to_num().abs().max())


@pytest.mark.parametrize("name", ["llama", "mistral with window"])
def test_a_long_context_is_attended_to_in_spans(name: str) -> None:
    twin = Twin(loaded(name), threads=2)
    twin.right(0, 1100)
    twin.copy()
    right = twin.right(1100, 1110)
    got = twin.got(list(range(1100, 1110)))
    assert float((right - got).abs().max()) < 1e-4 * float(right.abs().max())


def test_a_token_gives_the_same_bits_beside_any_others() -> None:
    twin = Twin(loaded("llama"), threads=2)
    twin.right(0, 700)
    twin.copy()
    together = twin.got([*range(600, 600 + MOST_TOKENS)])
    for beside in (1, 2, 3, 4, 5, 8):
        for start in (0, 9):
            some = twin.got([*range(600 + start, 600 + start + beside)])
            assert torch.equal(some, together[start : start + beside])


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_engine_generates_the_same_with_and_without_it(name: str) -> None:
    model = loaded(name)
    answers = {}
    for kernels in ("native", "torch"):
        config = EngineConfig(
            pool_bytes=4 << 20, block_size=16, kernels=kernels, debug_nan_fill=True, max_batch_tokens=64
        )
        engine = LocalEngine(model, config, time.monotonic)
        run = Answers(engine)
        run.run(*(request(str(n), [5 + n * 7 + i for i in range(3 + 29 * n)], 6) for n in range(4)))
        answers[kernels] = run.ids
        assert (engine.no_native is None) == (kernels == "native")
    assert answers["native"] == answers["torch"]


def test_a_model_that_it_does_not_know_runs_without_it() -> None:
    engine = LocalEngine(tiny_loaded(), EngineConfig(pool_bytes=1 << 20), time.monotonic)
    assert "TinyModel is none of" in (engine.no_native or "")
    with pytest.raises(ValueError, match="kernels is native: TinyModel"):
        LocalEngine(tiny_loaded(), EngineConfig(pool_bytes=1 << 20, kernels="native"), time.monotonic)


def test_a_model_whose_code_differs_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("llama")
    model.module.model.norm.variance_epsilon = 0.0
    storage = KVStorage(model.shapes, 4, PAGE, dtype=model.dtype, device=model.device)
    assert native_decoder(model, storage, "auto")[0] is not None
    model.module.model.layers[1].mlp.act_fn = torch.nn.GELU()
    decoder, reason = native_decoder(model, storage, "auto")
    assert decoder is None
    assert "differ" in (reason or "")


def test_a_machine_without_a_compiler_runs_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CannotBuild, match="no C\\+\\+ compiler"):
        native_library(tmp_path)
    monkeypatch.setattr(adoption, "NativeDecoder", lambda *_: native_library(tmp_path))
    model = loaded("llama")
    storage = KVStorage(model.shapes, 4, PAGE, dtype=model.dtype, device=model.device)
    assert native_decoder(model, storage, "auto") == (
        None,
        "there is no C++ compiler (g++ or clang++; CXX names another)",
    )


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(CannotBuild, match="failed"):
        native_library(tmp_path)
    assert not list(tmp_path.glob("*.so"))
