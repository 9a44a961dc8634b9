"""Bytes that a weight takes, as a checkpoint's quantization config says. Plain arithmetic over dicts; no torch.

A linear layer of `rows` outputs and `columns` inputs; what is not listed stays in the model's own type:

    method              codes            metadata
    awq, gptq           bits             fp16 scale and `bits` zero point a group; gptq: int32 group index a column
    bitsandbytes 4-bit  4                float32 a block of 64; double quantization: 1 byte, float32 a 256 of them
    bitsandbytes 8-bit  8                float32 a row
    compressed-tensors  num_bits         bf16 scale a group, row, block or tensor; zero point where not symmetric
    fp8                 8                float32 a block of `weight_block_size`
    mxfp4               4                1 byte a group of 32; experts only

compressed-tensors of transformers 5 saves disk, not memory: it has no kernels for its integer codes and decodes the
whole model at the first forward (measured: 135 million weights of 4 bits, 173 MB stored, 545 MB after it in float32).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BNB_BLOCK, BNB_SECOND_BLOCK = 64, 256
MX_GROUP = 32


class UnknownQuantization(ValueError):
    """A method whose bytes are not known here."""


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """How linear layers lie. `group` columns share a scale; 0: a row does. `skip` are names of modules that stay."""

    method: str
    bits: int
    group: int
    scale_bytes: float  # for each group, zero points and second-level scales included
    column_bytes: int = 0  # for each column
    row_bytes: int = 0  # for each row
    skip: tuple[str, ...] = ()
    experts_only: bool = False
    decoded: bool = False  # only stored so: the first forward decodes all of it into the model's own type

    def nbytes(self, rows: int, columns: int) -> int:
        groups = math.ceil(columns / self.group) if self.group else 0
        codes = math.ceil(rows * columns * self.bits / 8)
        return codes + math.ceil(rows * groups * self.scale_bytes) + rows * self.row_bytes + columns * self.column_bytes

    def takes(self, module: str) -> bool:
        """Whether the linear layer of this name is quantized."""
        if self.experts_only and ".experts" not in module:
            return False
        return not any(_names(entry, module) for entry in self.skip)

    @property
    def words(self) -> str:
        shared = f", groups of {self.group}" if self.group else ""
        return f"{self.bits}-bit {self.method}{shared}"


def _names(entry: str, module: str) -> bool:
    """`entry` names a module whole, one of its dotted parts or several in a row, or is `re:` and a pattern."""
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    return f".{entry}." in f".{module}."


def linear_format(quantization: Mapping[str, Any]) -> LinearFormat:
    """Of a config's `quantization_config`. Raises UnknownQuantization."""
    method = str(quantization.get("quant_method") or "")
    if method in ("awq", "gptq"):
        return _grouped(method, quantization)
    if method == "bitsandbytes" or quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return _bitsandbytes(quantization)
    if method == "compressed-tensors":
        return _compressed(quantization)
    skip = ("lm_head", *(quantization.get("modules_to_not_convert") or ()))
    if method == "fp8":
        rows, columns = quantization.get("weight_block_size") or (1, 0)
        return LinearFormat("fp8", 8, columns, 4 / rows, skip=skip, row_bytes=0 if columns else 4)
    if method == "mxfp4":
        return LinearFormat("mxfp4", 4, MX_GROUP, 1, skip=skip, experts_only=True)
    raise UnknownQuantization(f"quantization method {method!r}: its bytes are not known")


def _grouped(method: str, quantization: Mapping[str, Any]) -> LinearFormat:
    bits, group = int(quantization["bits"]), int(quantization.get("group_size", 128))
    skip = tuple(quantization.get("modules_to_not_convert") or ())
    if method == "awq" or not quantization.get("lm_head"):
        skip += ("lm_head",)
    group = max(group, 0)
    zero = bits / 8
    return LinearFormat(
        method, bits, group, 2 + zero, skip=skip,
        column_bytes=4 if method == "gptq" else 0, row_bytes=0 if group else math.ceil(2 + zero),
    )  # fmt: skip


def _bitsandbytes(quantization: Mapping[str, Any]) -> LinearFormat:
    skip = ("lm_head", *(quantization.get("llm_int8_skip_modules") or ()))
    if quantization.get("load_in_8bit") or quantization.get("_load_in_8bit"):
        return LinearFormat("bitsandbytes", 8, 0, 0, row_bytes=4, skip=skip)
    double = quantization.get("bnb_4bit_use_double_quant")
    return LinearFormat("bitsandbytes", 4, BNB_BLOCK, 1 + 4 / BNB_SECOND_BLOCK if double else 4, skip=skip)


def _compressed(quantization: Mapping[str, Any]) -> LinearFormat:
    """Where groups of modules differ, the widest: never too little is counted."""
    formats = [
        _weights_of(scheme["weights"], tuple(quantization.get("ignore") or ()))
        for scheme in (quantization.get("config_groups") or {}).values()
        if scheme.get("weights")
    ]
    if not formats:
        raise UnknownQuantization("compressed-tensors without quantized weights: their bytes are not known")
    return max(formats, key=lambda format: format.bits)


def _weights_of(weights: Mapping[str, Any], skip: tuple[str, ...]) -> LinearFormat:
    bits, strategy = int(weights["num_bits"]), weights.get("strategy")
    zero = 0 if weights.get("symmetric", True) else bits / 8
    if strategy in ("group", "tensor_group"):
        scale = 1 if weights.get("type") == "float" and bits == 4 else 2  # nvfp4 and mxfp4 scales are 8-bit floats
        return LinearFormat(
            "compressed-tensors", bits, int(weights["group_size"]), scale + zero, skip=skip, decoded=True
        )
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return LinearFormat("compressed-tensors", bits, columns, 2 / rows, skip=skip, decoded=True)
    row_bytes = math.ceil(2 + zero)
    return LinearFormat("compressed-tensors", bits, 0, 0, row_bytes=row_bytes, skip=skip, decoded=True)
