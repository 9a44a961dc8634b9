"""The tensors of the pool: per layer, keys and values of every page. Knows no requests and no index.

keys[layer]    [pages, block_size, kv_heads, key_dim]       slot = page * block_size + position % block_size
values[layer]  [pages, block_size, kv_heads, value_dim]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.local.kv.pool import Pages


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
        self._nan_fill = nan_fill
        if nan_fill:
            for pages in self._all():
                pages[1:] = torch.nan

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """`key` [tokens, kv_heads, key_dim], `value` likewise, to `slots` [tokens] int64."""
        self.key_slots[layer].index_copy_(0, slots, key)
        self.value_slots[layer].index_copy_(0, slots, value)

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

    def _fill(self, pages: Pages, value: float) -> None:
        if len(pages):
            index = torch.from_numpy(pages).to(self.device, torch.int64)
            for tensor in self._all():
                tensor.index_fill_(0, index, value)

    def _all(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]
