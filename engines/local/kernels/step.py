"""One forward on the kernels: what its rows read is laid out once, every layer walks over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
from torch import Tensor

from engines.local.kernels.attend import (
    FEWEST_ROWS,
    SPLIT_TOKENS,
    DeviceTiles,
    Launch,
    attend,
    tile_tokens,
    wide,
    write,
)
from engines.local.kernels.path import KernelRow
from engines.local.kernels.tiles import Tiles, lay_blocks, lay_tiles
from engines.local.kv.precision import Precision
from engines.local.kv.storage import KVStorage
from engines.local.partial import Scores

CHUNK_ROWS, WIDE_CHUNK_ROWS = 64, 32  # (token, head of the group) rows of a prefill block; the second of wide heads


@dataclass(slots=True)
class KernelStep:
    """Called by every layer in its turn: writes what is new, attends, and gives [tokens, heads, value_dim]."""

    storage: KVStorage
    slots: Tensor
    launches: tuple[Launch, ...]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """`query` [heads, tokens, key_dim], `key` and `value` [tokens, kv_heads, dim]."""
        write(self.storage, layer, self.slots, key, value)
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for launch in self.launches:
            attend(self.storage, layer, launch, query, scores, out)
        return out


@dataclass(slots=True)
class Kernels:
    """Lays out forwards over one storage. `group` is the most query heads that share a KV head."""

    storage: KVStorage
    group: int
    _tile_tokens: Mapping[Precision, int] = field(init=False)

    def __post_init__(self) -> None:
        first = next(iter(self.storage.keys))
        self._tile_tokens = {
            precision: tile_tokens(arena.planes(first)[0].key) for precision, arena in self.storage.arenas.items()
        }

    @property
    def decode_rows(self) -> int:
        return max(FEWEST_ROWS, int(triton.next_power_of_2(self.group)))

    @property
    def chunk_rows(self) -> int:
        storage = self.storage
        dims = [pages.shape[3] for of_layer in (storage.keys, storage.values) for pages in of_layer.values()]
        return max(WIDE_CHUNK_ROWS if wide(storage.dtype, *dims) else CHUNK_ROWS, self.decode_rows)

    def step(self, rows: Sequence[KernelRow], slots: Tensor) -> KernelStep:
        """`rows` in the order of the batch, those of one token first; `slots` int64 [tokens]."""
        decode = [row for row in rows if row.tokens == 1]
        chunks = rows[len(decode) :]
        launches = []
        if decode:
            launches.append(self.launch(decode, self.decode_rows, split=True))
        if chunks:
            launches.append(self.launch(chunks, self.chunk_rows, split=False))
        return KernelStep(self.storage, slots, tuple(launches))

    def launch(self, rows: Sequence[KernelRow], block_rows: int, *, split: bool) -> Launch:
        laid = self.lay(rows)
        blocks = lay_blocks(
            [(number, row.first, row.tokens, row.position) for number, row in enumerate(rows)],
            block_rows // self.group,
        )
        tiles = {}
        for precision, own in laid.items():
            share = self.share(precision) if split else own.longest
            splits = -(-own.longest // share)
            tiles[precision] = DeviceTiles(self._tensor(own.tiles), self._tensor(own.offsets), share, splits)
        last = rows[-1]
        return Launch(
            self._tensor(blocks), rows[0].first, last.first + last.tokens - rows[0].first, block_rows, self.group, tiles
        )

    def lay(self, rows: Sequence[KernelRow]) -> dict[Precision, Tiles]:
        storage = self.storage
        tables, lengths = [row.table for row in rows], [row.length for row in rows]
        return lay_tiles(tables, lengths, storage.block_size, storage.units, self._tile_tokens)

    def most_tiles(self, tokens: int) -> dict[Precision, int]:
        """Of a row of `tokens`, in each precision that there is; a unit that is left amid a tile makes one more."""
        size = self.storage.block_size
        smallest = {Precision.FULL: size} | {p: min(own, size) for p, own in self._tile_tokens.items()}
        return {precision: -(-tokens // least) + 1 for precision, least in smallest.items()}

    def share(self, precision: Precision) -> int:
        """Tiles of a decoding row that one program takes."""
        tokens = self.storage.block_size if precision == Precision.FULL else self._tile_tokens[precision]
        return max(SPLIT_TOKENS // tokens, 1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.storage.device, non_blocking=True)
