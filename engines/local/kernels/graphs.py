"""Decode steps from static buffers, so that a GPU can replay one recorded graph instead of launching kernel by kernel.

    rows of a step   1 ... n    -> bucket: the next power of two; the rows above n are padding
    padding          token 0 at position 0, slot -1 (written nowhere), no tiles: attends to nothing, gives zeros
    a graph for      (bucket, splits of each precision): the splits are rounded up to a power of two, too

What is recorded is the whole forward. On CUDA that is a CUDA graph (`CudaReplay`; not yet run on a device); elsewhere
the forward runs again on the same buffers (`again`), which is how buffers, padding and buckets are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.local.attention import KVStep
from engines.local.kernels.attend import DeviceTiles, Launch
from engines.local.kernels.path import Forward, KernelRow
from engines.local.kernels.step import Kernels, KernelStep
from engines.local.kernels.tiles import Tiles
from engines.local.kv.precision import Precision

Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
Key = tuple[int, tuple[tuple[Precision, int], ...]]
WARM_UPS = 2  # runs before a recording, in which libraries choose their algorithms and allocate


def again(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The replay of a device that records nothing."""
    return run


class CudaReplay:
    """Records on a stream of its own, all graphs in one memory pool. Not yet run on a device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True)
class Buffers:
    """Inputs of one bucket, always in the same place."""

    ids: Tensor  # int64 [bucket]
    positions: Tensor
    slots: Tensor
    keep: Tensor
    blocks: Tensor  # int32 [bucket, 4]
    tiles: Mapping[Precision, Tensor]  # int32 [most tiles, 4]
    offsets: Mapping[Precision, Tensor]  # int32 [bucket + 1]

    @classmethod
    def empty(cls, bucket: int, most_tiles: Mapping[Precision, int], device: torch.device) -> Buffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            zeros(bucket),
            zeros(bucket),
            zeros(bucket),
            torch.arange(bucket, device=device),
            zeros(bucket, 4, dtype=torch.int32),
            {p: zeros(bucket * most, 4, dtype=torch.int32) for p, most in most_tiles.items()},
            {p: zeros(bucket + 1, dtype=torch.int32) for p in most_tiles},
        )

    def fill(self, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, laid: Mapping[Precision, Tiles]) -> None:
        """Of the rows that there are; the others become padding."""
        rows, bucket = len(ids), len(self.ids)
        padding = (0, bucket - rows)
        blocks = np.zeros((bucket, 4), np.int32)
        blocks[:, 0] = blocks[:, 1] = np.arange(bucket)
        blocks[:, 2] = 1
        blocks[:rows, 3] = positions
        for into, array in (
            (self.ids, np.pad(ids, padding)),
            (self.positions, np.pad(positions, padding)),
            (self.slots, np.pad(slots, padding, constant_values=-1)),
            (self.blocks, blocks),
        ):
            into.copy_(torch.from_numpy(array))
        for precision, into in self.tiles.items():
            own = laid.get(precision)
            if own is None:
                self.offsets[precision].zero_()
                continue
            into[: len(own.tiles)].copy_(torch.from_numpy(own.tiles))
            self.offsets[precision].copy_(torch.from_numpy(np.pad(own.offsets, padding, mode="edge")))


@dataclass(slots=True)
class DecodeGraphs:
    """`window` tokens are the longest that a row may be."""

    kernels: Kernels
    forward: Forward
    window: int
    most_rows: int
    record: Record
    recorded: dict[Key, Callable[[], Tensor]] = field(default_factory=dict)
    refused: str | None = None  # why nothing is recorded any more
    _buffers: dict[int, Buffers] = field(default_factory=dict)

    def takes(self, rows: int) -> bool:
        return self.refused is None and 0 < rows <= self.most_rows

    def run(
        self, ids: np.ndarray, positions: np.ndarray, slots: np.ndarray, rows: Sequence[KernelRow]
    ) -> Tensor | None:
        """One token a row, int64 each -> logits [rows, vocab]; None where this model cannot be recorded, and then no
        more is tried."""
        laid = self.kernels.lay(rows)
        bucket = power_of_two(len(rows))
        splits = {p: power_of_two(-(-own.longest // self.kernels.share(p))) for p, own in laid.items()}
        key: Key = (bucket, tuple(sorted(splits.items())))
        buffers = self._of(bucket)
        buffers.fill(ids, positions, slots, laid)
        if key not in self.recorded:
            try:
                self.recorded[key] = self.record(self._forward(buffers, bucket, splits))
            except RuntimeError as error:  # a model that waits for the device amid its forward
                self.refused = str(error).splitlines()[0]
                return None
        return self.recorded[key]()[: len(rows)]

    def _of(self, bucket: int) -> Buffers:
        if bucket not in self._buffers:
            most = self.kernels.most_tiles(self.window)
            self._buffers[bucket] = Buffers.empty(bucket, most, self.kernels.storage.device)
        return self._buffers[bucket]

    def _forward(self, buffers: Buffers, bucket: int, splits: Mapping[Precision, int]) -> Callable[[], Tensor]:
        tiles = {
            p: DeviceTiles(buffers.tiles[p], buffers.offsets[p], self.kernels.share(p), count)
            for p, count in splits.items()
        }
        kernels = self.kernels
        launch = Launch(buffers.blocks, 0, bucket, kernels.decode_rows, kernels.group, tiles)
        attend = KernelStep(kernels.storage, buffers.slots, (launch,))

        def run() -> Tensor:
            step = KVStep(kernels.storage, buffers.slots, None, (), attend)
            logits = self.forward(buffers.ids[None], buffers.positions[None], buffers.keep, step)[0].float()
            if step.calls != kernels.storage.num_layers:
                raise RuntimeError(f"the model attended {step.calls} times of {kernels.storage.num_layers}")
            return logits

        return run


def power_of_two(number: int) -> int:
    """The least that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
