"""Converts one GGUF file into a transformers folder with float32 safetensors. Knows no network.

transformers reads GGUF itself, but slowly (a minute for 135M parameters, half of it the tokenizer), so it is done once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

DIGIT_SPLITTING = frozenset({"smollm"})  # values of tokenizer.ggml.pre whose upstream tokenizer splits single digits


def convert(source: Path, into: Path) -> Path:
    """Write `into` (made here) from the GGUF file `source`: weights, configuration, tokenizer, chat template.

    Float32 is exact: each quantized value is a float32 product. About 1.5 GB of memory for 135M parameters.
    """
    into.mkdir(parents=True)
    _write_weights(source, into)
    _write_tokenizer(source, into)
    return into


def _write_weights(source: Path, into: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        attn_implementation="sdpa",  # named, or some architectures choose a kernel of the GGUF project
        quantization_config=GgufConfig(dequantize=True),
    )
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)  # the same storage as the embedding: safetensors refuses to write it twice
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "model.safetensors").chmod(0o644)
    config = {k: v for k, v in model.config.to_dict().items() if k not in {"quantization_config", "_name_or_path"}}
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    _write_json(into / "config.json", config)
    ends = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}
    _write_json(into / "generation_config.json", ends)


def _write_tokenizer(source: Path, into: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    window = json.loads((into / "config.json").read_text()).get("max_position_embeddings")
    if window:
        tokenizer.model_max_length = window
    tokenizer.save_pretrained(into)
    settings = json.loads((into / "tokenizer_config.json").read_text())
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    _write_json(into / "tokenizer_config.json", settings)
    if _pre_tokenizer(source) in DIGIT_SPLITTING:
        _split_digits(into / "tokenizer.json")


def _split_digits(path: Path) -> None:
    """Put the digit split back that transformers' GGUF reader drops: without it "  1" has other ids than upstream's."""
    tokenizer = Tokenizer.from_file(str(path))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.save(str(path))


def _pre_tokenizer(source: Path) -> str | None:
    field = GGUFReader(source).get_field("tokenizer.ggml.pre")
    return str(field.contents()) if field is not None else None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
