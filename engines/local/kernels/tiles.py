"""What the kernels walk over in one forward: tiles of K/V by precision, and blocks of queries. numpy, no tensors.

A tile is what a kernel reads at once: a page in full precision, or as many tokens of a sealed unit as share a step of
the keys (64, with 4-bit keys 32). It says where it lies and which of its tokens belong to the sequence:

    unit     | 0 ... 31          | 32 ... 63         |    4-bit keys: two tiles, place 2 * unit and 2 * unit + 1
    path       . . . . . 80 ... 95 | 96 ... 127        |    entered amid a tile: base 64, low 80, high 96

tiles    int32 [tiles, 4]    place, base (position of its first token), low, high (positions that are meant)
offsets  int32 [rows + 1]    the tiles of a row, in the order of their positions
blocks   int32 [blocks, 4]   row, first token in the batch, tokens, position of the first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.precision import Precision
from engines.local.kv.quant import UNIT
from engines.local.kv.units import Units

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of all rows, in one precision."""

    tiles: Ints
    offsets: Ints

    @property
    def longest(self) -> int:
        """Most tiles of a row."""
        return int(np.diff(self.offsets).max(initial=0))


def lay_tiles(
    tables: Sequence[NDArray[np.int64]],
    lengths: Sequence[int],
    block_size: int,
    units: Units | None,
    tile_tokens: Mapping[Precision, int],
) -> dict[Precision, Tiles]:
    """`tables` int64: the pages of each row's first `lengths` tokens. `tile_tokens` of each sealed precision.

    Precisions that no row has are left out.
    """
    counts = np.array([len(table) for table in tables], np.int64)
    row = np.repeat(np.arange(len(tables)), counts)
    pages = np.concatenate(tables) if len(tables) else np.empty(0, np.int64)
    base = (np.arange(len(pages)) - np.repeat(np.cumsum(counts) - counts, counts)) * block_size
    high = np.minimum(base + block_size, np.array(lengths, np.int64)[row])
    if units is None:
        return {Precision.FULL: _tiles(row, len(tables), pages, base, base, high)} if len(pages) else {}
    bits = units.bits[pages]
    laid: dict[Precision, Tiles] = {}
    for number in sorted({*bits.tolist()}, reverse=True):
        precision, own = Precision(number), bits == number
        where = (row[own], len(tables))
        if precision == Precision.FULL:
            laid[precision] = _tiles(*where, pages[own], base[own], base[own], high[own])
        else:
            first, each = units.first[precision], units.pages_per_unit
            laid[precision] = _sealed(
                *where, pages[own] - first, base[own], high[own], block_size, each, tile_tokens[precision]
            )
    return laid


def _sealed(
    row: NDArray[np.int64],
    num_rows: int,
    where: NDArray[np.int64],
    base: NDArray[np.int64],
    high: NDArray[np.int64],
    block_size: int,
    each: int,
    tile: int,
) -> Tiles:
    """Pages of units, `where` counted from the precision's first: several make a tile, or one makes several."""
    each_page = max(block_size // tile, 1)
    part = np.tile(np.arange(each_page), len(where)) * tile
    row, where, base, high = (np.repeat(x, each_page) for x in (row, where, base, high))
    inner = (where % each) * block_size + part  # token of the unit
    low = base + part
    high = np.minimum(low + min(block_size, tile), high)
    place = (where // each) * (UNIT // tile) + inner // tile
    start = low - inner % tile  # position of the tile's first token
    kept = high > low
    row, place, start, low, high = (x[kept] for x in (row, place, start, low, high))
    new = np.ones(len(row), np.bool_)  # else: goes on in the tile before it
    new[1:] = (np.diff(row) != 0) | (np.diff(place) != 0) | (np.diff(start) != 0)
    firsts = np.flatnonzero(new)
    lasts = np.append(firsts[1:], len(row)) - 1
    return _tiles(row[firsts], num_rows, place[firsts], start[firsts], low[firsts], high[lasts])


def _tiles(
    row: NDArray[np.int64],
    num_rows: int,
    place: NDArray[np.int64],
    base: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
) -> Tiles:
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(row, minlength=num_rows), out=offsets[1:])
    return Tiles(np.stack((place, base, low, high), 1).astype(np.int32), offsets)


def lay_blocks(rows: Sequence[tuple[int, int, int, int]], tokens_a_block: int) -> Ints:
    """`rows` of (row, first token, tokens, position of the first) -> blocks of at most `tokens_a_block` tokens."""
    blocks = [
        (row, first + start, min(tokens_a_block, tokens - start), position + start)
        for row, first, tokens, position in rows
        for start in range(0, tokens, tokens_a_block)
    ]
    return np.array(blocks, np.int32).reshape(-1, 4)
