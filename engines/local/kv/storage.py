"""The tensors of the pool: per layer, keys and values of every page. Knows no requests and no index.

keys[layer]    [pages, block_size, kv_heads, key_dim]       slot = page * block_size + position % block_size
values[layer]  [pages, block_size, kv_heads, value_dim]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.local.kv.pool import Pages, Slots
from engines.local.rope import Rotation, Rotations


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer writes per token, as seen by the probe (never taken from a config)."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


def bytes_per_token(shapes: Mapping[int, LayerShape], dtype: torch.dtype) -> int:
    """KV bytes of one token over all layers: sum of kv_heads * (key_dim + value_dim) * itemsize."""
    return sum(shape.elements for shape in shapes.values()) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """Where the K/V of a sequence's first `length` tokens lies: in consecutive slots from `slot` on, or in `pages`."""

    length: int
    slot: int | None
    pages: Tensor | None  # int64; None where `slot` is given


class KVStorage:
    """Page 0 stays zero: padding reads it."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_pages: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rotations: Rotations | None = None,
        nan_fill: bool = False,
    ) -> None:
        def empty(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_pages + 1, block_size, heads, dim, dtype=dtype, device=device)

        self.block_size = block_size
        self.num_layers = len(shapes)
        self.device = device
        self.keys = {layer: empty(shape.kv_heads, shape.key_dim) for layer, shape in shapes.items()}
        self.values = {layer: empty(shape.kv_heads, shape.value_dim) for layer, shape in shapes.items()}
        self.key_slots = {layer: pages.flatten(0, 1) for layer, pages in self.keys.items()}
        self.value_slots = {layer: pages.flatten(0, 1) for layer, pages in self.values.items()}
        self._rotations = rotations or {}
        self._nan_fill = nan_fill
        if nan_fill:
            for pages in self._all():
                pages[1:] = torch.nan

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """`key` [tokens, kv_heads, key_dim], `value` likewise, to `slots` [tokens] int64."""
        self.key_slots[layer].index_copy_(0, slots, key)
        self.value_slots[layer].index_copy_(0, slots, value)

    def span(self, table: np.ndarray, length: int) -> Span:
        """Of a page table, int64, one entry for each page of `length` tokens."""
        if int(table[-1]) - int(table[0]) == len(table) - 1 and bool((np.diff(table) == 1).all()):
            return Span(length, int(table[0]) * self.block_size, None)
        return Span(length, None, torch.from_numpy(table).to(self.device))

    def read(self, layer: int, span: Span, *, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, tokens, dim] of the span, or of its `last` tokens.

        Where the pages are one run nothing is copied: what comes back is the pool itself, to be read at once.
        """
        start = max(span.length - last, 0) if last is not None else 0
        if span.slot is not None:
            at = slice(span.slot + start, span.slot + span.length)
            keys, values = self.key_slots[layer][at], self.value_slots[layer][at]
        else:
            assert span.pages is not None
            keys = self.keys[layer].index_select(0, span.pages).flatten(0, 1)[start : span.length]
            values = self.values[layer].index_select(0, span.pages).flatten(0, 1)[start : span.length]
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def freed(self, pages: Pages) -> None:
        if self._nan_fill:
            self._fill(pages, torch.nan)

    def allocated(self, pages: Pages) -> None:
        if self._nan_fill:  # a masked slot still meets its value with weight 0, and 0 * NaN is NaN
            self._fill(pages, 0.0)

    def zero(self, pages: Pages) -> None:
        self._fill(pages, 0.0)

    def copy(self, source: int, target: int, num_slots: int) -> None:
        for pages in self._all():
            pages[target, :num_slots] = pages[source, :num_slots]

    @torch.inference_mode()
    def move(self, source: Slots, target: Slots, old: int, new: int) -> None:
        """Values as they are; keys turned from positions old, old + 1, ... to new, new + 1, ..."""
        at, to = (torch.from_numpy(slots).to(self.device) for slots in (source, target))
        before, after = (torch.arange(first, first + len(source), device=self.device) for first in (old, new))
        angles: dict[int, tuple[Tensor, Tensor]] = {}
        turned: Rotation | None
        for layer, turned in self._rotations.items():
            keys = self.key_slots[layer].index_select(0, at)
            if turned is not None:
                if id(turned) not in angles:
                    angles[id(turned)] = turned.angles(before, after)
                keys = turned.turned(keys, angles[id(turned)])
            self.key_slots[layer].index_copy_(0, to, keys)
            self.value_slots[layer].index_copy_(0, to, self.value_slots[layer].index_select(0, at))

    def _fill(self, pages: Pages, value: float) -> None:
        if len(pages):
            index = torch.from_numpy(pages).to(self.device, torch.int64)
            for tensor in self._all():
                tensor.index_fill_(0, index, value)

    def _all(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]
