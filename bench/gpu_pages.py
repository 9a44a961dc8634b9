"""Pages of every precision in one session, for checks of the kernels: made of random numbers, read two ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.local.kernels.path import KernelRow
from engines.local.kernels.step import Kernels
from engines.local.kv.precision import SEALED, Precision
from engines.local.kv.quant import UNIT, codecs
from engines.local.kv.sealed import Encode, encode_into, unit_bytes
from engines.local.kv.shapes import LayerShape
from engines.local.kv.spans import MixedSpan, Part
from engines.local.kv.storage import KVStorage
from engines.local.kv.units import Units
from engines.local.partial import Scores, attend_parts


@dataclass(frozen=True, slots=True)
class Pages:
    storage: KVStorage
    units: Units
    size: int

    @property
    def each(self) -> int:
        """Pages of a unit."""
        return UNIT // self.size

    def seal(self, source: np.ndarray, precision: Precision) -> np.ndarray:
        target = self.units.take(precision)
        assert target is not None
        assert self.storage.seal(source.astype(np.int32), target)
        return target

    def mixed(self, first: int, *, torn: bool = False) -> np.ndarray:
        """Int64 page table of what lay in pages `first` ...: full | INT8 | INT4 | full | K8V4 (torn: its second
        half) | full, pages of one unit each."""
        each = self.each
        page = np.arange(first, first + 6 * each, dtype=np.int64)
        parts = [page[:each]]
        for at, precision in ((1, Precision.INT8), (2, Precision.INT4)):
            parts.append(self.seal(page[at * each : (at + 1) * each], precision))
        parts.append(page[3 * each : 4 * each])
        last = self.seal(page[4 * each : 5 * each], Precision.K8V4)
        parts.append(last[each // 2 :] if torn else last)
        return np.concatenate([*parts, page[5 * each :]]).astype(np.int64)


def make_pages(
    shapes: Mapping[int, LayerShape],
    *,
    pages: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    encode: Encode = encode_into,
    seed: int = 3,
) -> Pages:
    sizes = {precision: unit_bytes(shapes, codecs, precision) for precision in SEALED}
    page_bytes = sum(shape.elements for shape in shapes.values()) * dtype.itemsize * size
    units = Units(pages, UNIT // size, page_bytes, sizes)
    storage = KVStorage(shapes, pages, size, dtype=dtype, device=device, units=units, encode=encode)
    draw = torch.Generator().manual_seed(seed)
    for layer in shapes:
        for into in (storage.keys[layer], storage.values[layer]):
            into[1:] = torch.randn(into[1:].shape, generator=draw).to(device, dtype)
    return Pages(storage, units, size)


def by_kernels(
    pages: Pages, layer: int, rows: list[tuple[np.ndarray, int, int]], query: Tensor, scores: Scores
) -> Tensor:
    """`rows` of (table, tokens, length), those of one token first; `query` [heads, tokens of all rows, key_dim] ->
    [tokens, heads, value_dim]. Nothing is written: what is attended to is what lies in the pages."""
    from engines.local.kernels.attend import attend

    heads, kv_heads = query.shape[0], pages.storage.keys[layer].shape[2]
    kernels = Kernels(pages.storage, heads // kv_heads)
    laid, first = [], 0
    for table, tokens, length in rows:
        laid.append(KernelRow(table, first, tokens, length - tokens))
        first += tokens
    out = query.new_full((first, heads, pages.storage.values[layer].shape[3]), torch.nan)
    step = kernels.step(laid, torch.empty(0))
    for launch in step.launches:
        attend(pages.storage, layer, launch, query, scores, out)
    return out


def by_reference(
    pages: Pages, layer: int, rows: list[tuple[np.ndarray, int, int]], query: Tensor, scores: Scores
) -> Tensor:
    """The same, row by row, by partial.attend_parts."""
    kv_heads = pages.storage.keys[layer].shape[2]
    grouped = query.view(kv_heads, -1, *query.shape[1:])
    outs, first = [], 0
    for table, tokens, length in rows:
        span = pages.storage.span(table, length)
        if not isinstance(span, MixedSpan):
            span = MixedSpan(length, (Part(0, length, Precision.FULL, span),))
        of_row = grouped[:, :, first : first + tokens]
        out = attend_parts(pages.storage, layer, span, of_row, length - tokens, scores)
        outs.append(out.flatten(0, 1).transpose(0, 1))
        first += tokens
    return torch.cat(outs)
