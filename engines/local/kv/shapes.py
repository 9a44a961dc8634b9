"""What a model's layers write for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


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
