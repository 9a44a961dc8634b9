"""Compiles the kernels for a GPU that is not here: what they need of a multiprocessor, and that they compile at all.

python -m bench.gpu --compile 90        compute capability 9.0; needs triton (it brings ptxas), no GPU
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engines.local.kernels.attend import padded, wide
from engines.local.kernels.device import append, attend, seal
from engines.local.kernels.step import CHUNK_ROWS, WIDE_CHUNK_ROWS
from engines.local.kv.quant import UNIT

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
FLOATS = ("scale", "softcap", "levels", "tight")
TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TILES = {(16, 16): 32, (8, 8): UNIT, (8, 4): UNIT, (4, 4): 32}  # bits of keys and values -> tokens of a tile


@dataclass(frozen=True, slots=True)
class Compiled:
    kernel: str
    shared_bytes: int
    cubin_bytes: int


def kernels(capability: int) -> Iterator[Compiled]:
    """Every kernel as Llama-like heads of 128 channels need it, in bfloat16."""
    for rows in (16, CHUNK_ROWS):
        for bits in TILES:
            yield partial(capability, "bf16", 128, bits, rows)
    into = {"Parts": "*fp32", "Most": "*fp32", "Sinks": "*bf16", "Plain": "*fp32", "Turned": "*fp32"}
    yield _compiled("merge", attend.merge, capability, into, HEADS=32, DIM=128, PADDED=128, SINKS=True, TURNED=True)
    pages = dict.fromkeys(("Key", "Value", "Keys", "Values"), "*bf16") | {"Slots": "*i64"}
    sizes = {"HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "KEY_PADDED": 128, "VALUE_PADDED": 128}
    yield _compiled("append", append.append, capability, pages, **sizes)
    unit = {"X": "*fp32", "Steps": "*fp16", "Lows": "*fp16", "Codes": "*u8"}
    of = {"TOKENS": UNIT, "HEADS": 8, "DIM": 128}
    for by_channel in (True, False):
        which = {"GROUP": 32, "PADDED": 128 if by_channel else 32, "BY_CHANNEL": by_channel}
        yield _compiled(f"grid {by_channel}", seal.grid, capability, unit, **of, **which)
    groups = {"HALF": 64, "TOKEN_GROUP": 1, "CHANNEL_GROUP": 64, "BITS": 4}
    yield _compiled("codes", seal.codes, capability, unit, **of, **groups)


def partial(capability: int, dtype: str, dim: int, bits: tuple[int, int], rows: int) -> Compiled:
    """Heads of `dim` channels, groups of four; `bits` of keys and of values, a key of TILES."""
    narrow = wide(TORCH[dtype], dim)
    rows = min(rows, WIDE_CHUNK_ROWS) if narrow else rows
    key, value = (f"*{dtype}" if one == 16 else "*u8" for one in bits)
    steps = f"*{dtype}" if bits[0] == 16 else "*fp16"
    pointers = {"Query": f"*{dtype}", "Keys": key, "Values": value, "Out": "*fp32", "Most": "*fp32"}
    pointers |= dict.fromkeys(("KeySteps", "KeyLows", "ValueSteps", "ValueLows"), steps)
    pointers |= dict.fromkeys(("Tiles", "Offsets", "Blocks"), "*i32")
    size = TILES[bits]
    return _compiled(
        f"partial {dtype} {dim} {bits} {rows} rows", attend.partial, capability, pointers,
        num_warps=8 if rows * dim >= 8192 else 4, num_stages=1 if narrow else 2,
        HEADS=32, GROUP=4, BLOCK_M=rows, KEY_DIM=dim, VALUE_DIM=dim, KEY_HALF=padded(dim // 2),
        VALUE_HALF=padded(dim // 2), KEY_BITS=bits[0], VALUE_BITS=bits[1], VALUE_GROUP=min(dim, 64), TILE=size,
        SIZE=size, SUBS=1 if bits[0] == 16 else UNIT // size, SOFTCAP=True, DOT=TYPES[dtype],
    )  # fmt: skip


def _compiled(
    name: str, kernel: Any, capability: int, pointers: dict[str, str], *, num_warps: int = 4, num_stages: int = 2,
    **constants: object,
) -> Compiled:  # fmt: skip
    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        return pointers.get(argument) or ("fp32" if argument in FLOATS else "i32")

    source = ASTSource(kernel, {name: kind(name) for name in kernel.arg_names}, constexprs=constants)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(name, made.metadata.shared, len(made.asm["cubin"]))


def compile_all(capability: int) -> dict[str, Any]:
    """As bench.gpu tells it; a kernel that does not compile raises."""
    most = SHARED_BYTES.get(capability, 99 << 10)
    found = list(kernels(capability))
    return {
        "ok": all(one.shared_bytes <= most for one in found),
        "capability": capability,
        "shared_bytes_there": most,
        "kernels": [asdict(one) for one in found],
    }
