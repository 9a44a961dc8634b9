"""Where the K/V of a path lies, as attention reads it: one run of pages, pages, or parts of several precisions.

table   | full full | INT8 INT8 INT8 INT8 | INT4 INT4 | full full full |
parts   | 0         | 1                   | 2         | 3              |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.local.kv.precision import Precision
from engines.local.kv.quant import UNIT
from engines.local.kv.units import Units


@dataclass(frozen=True, slots=True)
class Span:
    """Where the K/V of a sequence's first `length` tokens lies: in consecutive slots from `slot` on, or in `pages`."""

    length: int
    slot: int | None
    pages: Tensor | None  # int64; None where `slot` is given


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens start ... start + length of a sequence, all in one precision: `full` pages, or sealed `units` (int64, of
    that precision's arena), of whose tokens the first `skip` are not meant."""

    start: int
    length: int
    precision: Precision
    full: Span | None
    units: Tensor | None = None
    skip: int = 0


@dataclass(frozen=True, slots=True)
class MixedSpan:
    """The first `length` tokens of a sequence in more than one precision, the first part first."""

    length: int
    parts: tuple[Part, ...]


def is_run(table: np.ndarray) -> bool:
    return int(table[-1]) - int(table[0]) == len(table) - 1 and bool((np.diff(table) == 1).all())


def cut(table: np.ndarray, length: int, units: Units, block_size: int, device: torch.device) -> MixedSpan:
    """`table` int64 [pages of `length` tokens] -> its parts, each as long as may be."""
    bits = units.bits[table]
    # a part ends where the precision changes, or where a unit's pages are left before their end or entered amid them
    ends = np.flatnonzero((bits[1:] != bits[:-1]) | _torn(table, units)) + 1
    parts: list[Part] = []
    for first, last in zip((0, *ends.tolist()), (*ends.tolist(), len(table)), strict=True):
        pages, start = table[first:last], first * block_size
        tokens = min(last * block_size, length) - start
        precision = Precision(int(bits[first]))
        if precision == Precision.FULL:
            slot = int(pages[0]) * block_size if is_run(pages) else None
            full = Span(tokens, slot, torch.from_numpy(pages.copy()).to(device) if slot is None else None)
            parts.append(Part(start, tokens, precision, full))
            continue
        where = pages - units.first[precision]
        numbers = np.unique(where // units.pages_per_unit, return_index=True)
        in_order = numbers[0][np.argsort(numbers[1], kind="stable")]
        skip = int(where[0] % units.pages_per_unit) * block_size
        assert skip + tokens <= len(in_order) * UNIT
        parts.append(Part(start, tokens, precision, None, torch.from_numpy(in_order).to(device), skip))
    return MixedSpan(length, tuple(parts))


def _torn(table: np.ndarray, units: Units) -> np.ndarray:
    """Between which neighbours of the table a sealed unit is left amid, bool [pages - 1]; full pages are never torn."""
    sealed = table > units.num_pages
    block = (table - units.num_pages - 1) % units.pages_per_unit
    goes_on = (block[:-1] + 1 < units.pages_per_unit) & (table[1:] == table[:-1] + 1)
    begins = (block[:-1] + 1 == units.pages_per_unit) & (block[1:] == 0)
    torn: np.ndarray = sealed[:-1] & sealed[1:] & ~(goes_on | begins)
    return torn
