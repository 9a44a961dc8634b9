"""What a model takes and what fits a card: arithmetic, held against what is known of public models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from bench.fits import table
from engines.local.config import EngineConfig
from engines.local.fit import FULL_TOKENS, GIB, SEALED_SHARE, Footprint, fit, pool_bytes, sessions, told
from engines.local.footprint import read_footprint
from engines.local.kv.shapes import LayerShape
from engines.local.load import refuse_too_large
from engines.local.model import ModelRefused
from engines.local.room import room
from engines.local.sizing import _of_gpu
from engines.local.weight_bits import UnknownQuantization, linear_format
from gateway.cli import app
from tests.engines.local.tiny import tiny_loaded

CONFIGS = Path(__file__).parent / "configs"
# parameters as published, and, of quantized ones, GB of the published checkpoint's safetensors files where it is known
PUBLISHED: dict[str, tuple[int, float | None]] = {
    "llama-3.1-8b": (8_030_261_248, 16.06),
    "llama-3.1-8b-awq": (8_030_261_248, 5.73),
    "llama-3.2-3b": (3_212_749_824, 6.43),
    "qwen2.5-7b": (7_615_616_512, 15.23),
    "qwen2.5-7b-gptq": (7_615_616_512, 5.58),
    "qwen3-8b-awq": (8_190_735_360, None),
    "qwen3-14b-awq": (14_768_307_200, None),
    "qwen3-32b-awq": (32_762_123_264, None),
    "qwen3-30b-a3b-gptq": (30_532_122_624, None),
    "mistral-7b-v0.3-nf4": (7_248_023_552, None),
    "mistral-small-24b-w4a16": (23_572_403_200, None),
    "gemma-2-9b-nf4": (9_241_705_984, None),
    "gpt-oss-20b": (20_914_757_184, 13.76),
}


def _as_published(name: str) -> None:
    footprint = read_footprint(CONFIGS / name)
    parameters, gigabytes = PUBLISHED[name]
    assert footprint.parameters == parameters
    if gigabytes is not None:
        assert footprint.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_a_model_is_as_large_as_published() -> None:
    _as_published("llama-3.1-8b-awq")


@pytest.mark.prove
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_model_is_as_large_as_published(name: str) -> None:
    _as_published(name)


@pytest.mark.prove
def test_the_table_in_the_docs_is_what_the_command_prints() -> None:
    root = Path(__file__).parents[3]
    assert "\n".join(table(CONFIGS)) in (root / "docs" / "weights.md").read_text()


@pytest.mark.parametrize(
    ("quantization", "nbytes"),
    [
        # 4096 x 1024: codes, and what is shared
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 2 * 2**20 + 4096 * 8 * 2.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 4 * 2**20 + 4096 * 3 + 1024 * 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 4 * 2**20 + 4096 * 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 2 * 2**20 + 4096 * 16 * 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 4 * 2**20 + 32 * 8 * 4),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}},
            },
            2 * 2**20 + 4096 * 32 * 2,
        ),
    ],
)
def test_a_layer_takes_its_codes_and_what_is_shared(quantization: dict[str, object], nbytes: float) -> None:
    assert linear_format(quantization).nbytes(4096, 1024) == nbytes


def test_modules_that_stay_are_told_apart_and_an_unknown_method_is_said() -> None:
    format = linear_format({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["visual", "re:.*gate$"]})
    taken = [format.takes(name) for name in ("model.layers.0.mlp.up_proj", "lm_head", "model.visual.fc", "x.gate")]
    assert taken == [True, False, False, False]
    with pytest.raises(UnknownQuantization, match="'new'"):
        linear_format({"quant_method": "new"})


FOOTPRINT = Footprint("m", 10, "words", 4 * GIB, {"full": 100_000.0, "int4": 30_000.0}, 8192, GIB, runtime_bytes=0)


def test_what_is_left_holds_sessions_of_every_precision() -> None:
    small, large = (fit(FOOTPRINT, size * GIB, (2048, 8192, 32768)) for size in (5, 8))
    assert (small.fits, large.fits) == (False, True)
    assert large.pool_bytes == int(8 * GIB * 0.97) - 5 * GIB
    assert list(large.sessions) == [2048, 8192]  # the window is 8192
    assert large.sessions[8192]["full"] == large.pool_bytes // (8192 * 100_000)
    sealed = (8192 - FULL_TOKENS) * 30_000
    assert large.sessions[8192]["int4"] == int(large.pool_bytes * SEALED_SHARE / sealed)
    shared = sessions(large.pool_bytes, FOOTPRINT.kv_bytes, 8192, "int4", apart=False)
    assert shared == int(large.pool_bytes / (sealed + FULL_TOKENS * 100_000))
    assert "is 0.15 GiB too little" in told(FOOTPRINT, 5 * GIB)


def _folder(folder: Path, **config: object) -> Path:
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [0, 30]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(30))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_stored_is_counted_in_the_type_that_it_is_loaded_in(tmp_path: Path) -> None:
    def taken(item_bytes: int | None) -> int:
        return room(_folder(tmp_path), item_bytes=item_bytes, pool_bytes=0, free_bytes=10, gpu=None).weight_bytes

    assert (taken(None), taken(4)) == (30, 60)
    (tmp_path / "other.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="no safetensors file"):
        taken(None)


def test_codes_that_are_only_stored_so_count_as_what_they_are_decoded_to(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    folder = _folder(tmp_path, quantization_config=quantization)
    entry = {"dtype": "I32", "shape": [3, 5], "data_offsets": [0, 60]}
    header = json.dumps({"up.weight_packed": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(60))
    taken = room(folder, item_bytes=4, pool_bytes=0, free_bytes=10, gpu=None)
    assert taken.weight_bytes == 3 * 5 * 8 * 4


def test_an_engine_refuses_a_model_that_does_not_fit_with_the_arithmetic(tmp_path: Path) -> None:
    refuse_too_large(_folder(tmp_path), "cpu", None, EngineConfig())
    with pytest.raises(ModelRefused, match=r"weights 0.00 GiB \(15 elements, 4 bytes each\) \+ KV pool 1048576.00 GiB"):
        refuse_too_large(tmp_path, "cpu", None, EngineConfig(pool_bytes=1 << 50))


def test_an_engine_on_a_gpu_gives_its_pool_what_the_arithmetic_left_for_it(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    config.save_pretrained(tmp_path)
    footprint = read_footprint(tmp_path)
    with torch.device("meta"):
        module = LlamaForCausalLM(config)
    shapes = {layer: LayerShape(2, 16, 16) for layer in range(2)}
    model = replace(tiny_loaded(), module=module, shapes=shapes, dtype=torch.bfloat16)
    free = 8 * GIB - footprint.weight_bytes - footprint.runtime_bytes
    given = _of_gpu(EngineConfig(), model, free, 8 * GIB)
    assert given == pytest.approx(pool_bytes(footprint, 8 * GIB), abs=1)


def test_the_command_tells_what_fits_in_json_and_says_what_is_no_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["models", "fit", str(CONFIGS / "llama-3.2-3b-nf4"), "--gb", "4", "--gb", "8", "--json"]
    )
    found = json.loads(done.stdout)
    assert [card["fits"] for card in found["cards"]] == [True, True]
    assert found["weights"] == "4-bit bitsandbytes, groups of 64"
    assert found["kv_bytes"]["full"] == 28 * 2 * 8 * 128 * 2
    assert CliRunner().invoke(app, ["models", "fit", str(tmp_path)]).exit_code != 0
