"""Which attention a device gets, and whether that has ever run on one. Imports no triton.

CPU     torch     the reference (attention.py, partial.py)
CUDA    triton    where every layer is one that the kernels take; else torch, which gathers pages and masks them
CPU     triton    in Triton's interpreter only: for tests
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from engines.local.attention import Attend, KVStep
from engines.local.kv.sealed import Encode, encode_into
from engines.local.kv.shapes import LayerShape
from engines.local.kv.storage import KVStorage

# ids, positions, indices of tokens to keep, step -> logits
Forward = Callable[[Tensor, Tensor, Tensor, KVStep], Tensor]
AttentionName = Literal["torch", "triton"]
# bytes of a head's channels: 256 of 16 bits, 128 of float32. With twice that chunks over K8V4 units take 104 KiB
# of shared memory, and cards of compute capability 8.6 have 99.
WIDEST_BYTES = 512


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """`python -m bench.gpu` has passed all its checks there."""

    device: str  # as torch.cuda.get_device_name says it
    date: str
    triton: str
    result: str  # the file in bench/results that holds its output


# Entered by hand, with the result file, after a run of `python -m bench.gpu` on a device whose checks all passed.
DEVICE_RUNS: tuple[DeviceRun, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelRow:
    """`tokens` of one sequence, at `first` of the batch and `position` of the sequence; `table` int64 are the pages of
    everything up to their end."""

    table: np.ndarray
    first: int
    tokens: int
    position: int

    @property
    def length(self) -> int:
        return self.position + self.tokens


class DecodeGraphs(Protocol):
    """graphs.DecodeGraphs."""

    def takes(self, rows: int) -> bool: ...

    def run(
        self, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, rows: Sequence[KernelRow]
    ) -> Tensor | None: ...


class KernelPath(Protocol):
    def step(self, rows: Sequence[KernelRow], slots: Tensor) -> Attend:
        """`rows` in the order of the batch, those of one token first; `slots` int64 [tokens]: where K/V is written."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPath:
    name: AttentionName
    why: str
    device: str = "cpu"  # torch's name of its kind
    interpreted: bool = False

    @property
    def ran_on(self) -> tuple[str, ...]:
        """Devices on which its checks have passed. Of torch the CPU is one: every test runs on it."""
        runs = tuple(run.device for run in DEVICE_RUNS)
        return ("cpu", *runs) if self.name == "torch" else runs

    def report(self) -> dict[str, object]:
        """As `/health` tells it."""
        told: dict[str, object] = {"path": self.name, "why": self.why, "ran_on": list(self.ran_on)}
        if self.interpreted:
            told["interpreted"] = True
        if not DEVICE_RUNS and (self.name == "triton" or self.device != "cpu"):
            told["note"] = "not yet run on a device"
        return told


def choose_attention(
    wanted: str, device: torch.device, dtype: torch.dtype, shapes: Mapping[int, LayerShape]
) -> AttentionPath:
    """`wanted` is one of config.KERNELS. ValueError where Triton is asked for by name and cannot be."""
    if wanted in ("torch", "native"):
        return AttentionPath("torch", f"kernels is {wanted}", device.type)
    if wanted == "auto" and device.type != "cuda":
        return AttentionPath("torch", f"the device is {device.type}", device.type)
    against = _against_triton(device, dtype, shapes)
    if against is None:
        why = "kernels is triton" if wanted == "triton" else "the device is cuda"
        return AttentionPath("triton", why, device.type, interpreted=interpreting())
    if wanted == "triton":
        raise ValueError(f"kernels is triton: {against}")
    return AttentionPath("torch", against, device.type)


def kernel_path(path: AttentionPath, storage: KVStorage, group: int) -> KernelPath | None:
    """What the runner lays its forwards out with; None: it attends in torch. `group` query heads share a KV head."""
    if path.name == "torch":
        return None
    from engines.local.kernels.step import Kernels

    return Kernels(storage, group)


def decode_graphs(
    path: AttentionPath, kernels: KernelPath | None, forward: Forward, *, window: int, most_rows: int
) -> DecodeGraphs | None:
    """Recorded decode steps, for rows of at most `window` tokens; None where attention runs in torch."""
    if kernels is None:
        return None
    from engines.local.kernels import graphs
    from engines.local.kernels.step import Kernels

    assert isinstance(kernels, Kernels)
    record = graphs.again if path.interpreted else graphs.CudaReplay()
    return graphs.DecodeGraphs(kernels, forward, window, most_rows, record)


def encoder(path: AttentionPath) -> Encode:
    """What seals units."""
    if path.name == "torch":
        return encode_into
    from engines.local.kernels import seal

    return seal.encode_into


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _against_triton(device: torch.device, dtype: torch.dtype, shapes: Mapping[int, LayerShape]) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not interpreting():
        return f"the device is {device.type}, where Triton only interprets (TRITON_INTERPRET=1)"
    if interpreting() and dtype == torch.bfloat16:
        return "Triton's interpreter multiplies no bfloat16"
    for shape in shapes.values():
        for dim in (shape.key_dim, shape.value_dim):
            if dim % 2 or dim * dtype.itemsize > WIDEST_BYTES:
                most = WIDEST_BYTES // dtype.itemsize
                return f"a head of {dim} channels: kernels take even numbers up to {most} of this type"
    return None
