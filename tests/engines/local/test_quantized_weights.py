"""Checkpoints with quantized weights: loaded by their method's quantizer, or refused with what is lacking."""

from __future__ import annotations

import json
import time
from array import array
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engines.contract import Sampling
from engines.local.config import EngineConfig
from engines.local.engine import CoreRequest, LocalEngine
from engines.local.footprint import read_footprint
from engines.local.model import ModelRefused, load_model


@pytest.mark.model
@pytest.mark.skipif(find_spec("gptqmodel") is not None, reason="the package is here")
def test_a_method_whose_package_is_not_here_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match=r"quantized \(awq\), which cannot be loaded here: .*gptqmodel"):
        load_model(tmp_path)


@pytest.mark.prove
@pytest.mark.model
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_bitsandbytes_checkpoint_answers_on_a_cpu_and_takes_what_the_arithmetic_says(
    model_dir: Path, tmp_path: Path, bits: int
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    wanted = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    made = AutoModelForCausalLM.from_pretrained(
        model_dir, quantization_config=BitsAndBytesConfig(**wanted), device_map={"": "cpu"}, dtype=torch.float32
    )
    made.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    held = sum(part.nbytes for part in (*loaded.module.parameters(), *loaded.module.buffers()))
    held += sum(
        part.quant_state.absmax.nbytes for part in loaded.module.parameters() if getattr(part, "quant_state", None)
    )  # which 4-bit weights carry beside them
    counted = read_footprint(tmp_path, on_cpu=True).weight_bytes
    assert held == pytest.approx(counted, rel=0.005)
    engine = LocalEngine(loaded, EngineConfig(pool_bytes=64 << 20), time.monotonic)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    sampling = Sampling(max_tokens=8, temperature=0.0)
    engine.submit(CoreRequest("r", array("I", ids).tobytes(), None, None, "", 0, sampling))
    said = ""
    while engine.has_work():
        said += "".join(output.text for output in engine.step())
    assert "Paris" in said
