"""Whether a model's weights go into the memory that is free, looked at before they are loaded. Imports no torch.

Read are the headers of the folder's safetensors files: what is stored, and how large it is in the type that it is
loaded in. Codes of a quantized checkpoint are loaded as they lie.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.local.fit import FREE_SHARE, GIB, RUNTIME_BYTES
from engines.local.weight_bits import UnknownQuantization, linear_format

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}  # others: 1
FLOATS = ("F64", "F32", "BF16", "F16")
DECODED_BYTES = 2  # of an element that is decoded into the model's own type
LARGEST_HEADER = 100 << 20  # bytes; the format's own limit


@dataclass(frozen=True, slots=True)
class Room:
    """What loading takes of what is free, in bytes."""

    weight_bytes: int
    weights: str  # in words
    runtime_bytes: int
    pool_bytes: int
    free_bytes: int
    where: str  # "host memory", "cuda:0"

    @property
    def needed(self) -> int:
        return self.weight_bytes + self.runtime_bytes + self.pool_bytes

    @property
    def fits(self) -> bool:
        return self.needed <= self.free_bytes * (1 - FREE_SHARE)

    def told(self) -> str:
        """The arithmetic, for a refusal."""
        parts = [f"weights {_gib(self.weight_bytes)} ({self.weights})"]
        if self.runtime_bytes:
            parts.append(f"runtime {_gib(self.runtime_bytes)}")
        parts.append(f"KV pool {_gib(self.pool_bytes)}")
        return (
            f"it needs {' + '.join(parts)} = {_gib(self.needed)}, and of {self.where} {_gib(self.free_bytes)} "
            f"are free, of which {FREE_SHARE:.0%} stay unused. Take a smaller or a quantized model, or more memory: "
            "`turnkeep models fit` tells what fits"
        )


def room(folder: Path, *, item_bytes: int | None, pool_bytes: int, free_bytes: int, gpu: str | None) -> Room:
    """Of the model in `folder`. `item_bytes` of the type that weights are converted to at load, None: as they are
    stored. `pool_bytes` of the KV pool, 0: whatever is left. `gpu` names the device; None: host memory.

    Raises ValueError where a file is no safetensors file.
    """
    quantization = _quantization(folder)
    decoded_bits = _decoded_bits(quantization)
    count = loaded = 0
    for name, entry in _tensors(folder):
        elements = math.prod(entry["shape"])
        own = elements * ITEM_BYTES.get(entry["dtype"], 1)
        count += elements
        if decoded_bits and name.endswith((".weight", ".weight_packed")) and entry["dtype"] not in FLOATS:
            loaded += own * 8 // decoded_bits * (item_bytes or DECODED_BYTES)
        else:
            loaded += elements * item_bytes if item_bytes is not None and entry["dtype"] in FLOATS else own
    words = f"{count:,} elements, {loaded / max(count, 1):.3g} bytes each"
    if quantization:
        words = "quantized, decoded at the first forward" if decoded_bits else "quantized, as stored"
    return Room(loaded, words, RUNTIME_BYTES if gpu else 0, pool_bytes, free_bytes, gpu or "host memory")


def _quantization(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config") or {}
    return dict(config.get("quantization_config") or text.get("quantization_config") or {})


def _decoded_bits(quantization: dict[str, Any]) -> int:
    """Of codes that are only stored so; 0 where they are computed with, or where that is not known."""
    try:
        format = linear_format(quantization) if quantization else None
    except UnknownQuantization:
        return 0
    return format.bits if format is not None and format.decoded else 0


def _tensors(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The headers' names and entries: 8 bytes of length, little-endian, then as much JSON (the safetensors format)."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= LARGEST_HEADER:
                raise ValueError(f"{path} is no safetensors file: its header would be {length} bytes")
            header = json.loads(file.read(length))
        yield from ((name, entry) for name, entry in header.items() if name != "__metadata__")


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
