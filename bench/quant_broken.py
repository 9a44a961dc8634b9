"""Two codecs that look right and are not, as they went round in articles: what every bar must refuse.

Both hold `scale` and an integer zero point, and read a code back as `(code - zero) * scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.local.kv.quant import METADATA, UNIT, Codec, Encoded, PlaneLayout


@dataclass(frozen=True, slots=True)
class ZeroPointPlane:
    """8 bits. `zero` "dropped": codes are measured from the least element and read back as if from 0.
    `zero` "clamped": the zero point must be a uint8, which it cannot where a group does not reach over 0."""

    by: str
    zero: str
    turned: bool = False

    def layout(self, heads: int, dim: int) -> PlaneLayout:
        steps = (1, heads, dim) if self.by == "channel" else (UNIT, heads, 1)
        return PlaneLayout((UNIT, heads, dim), steps)

    def encode(self, x: Tensor) -> Encoded:
        axis = 1 if self.by == "channel" else -1
        least, most = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
        scale = ((most - least) / 255).clamp_min(1e-7)
        zero = (-least / scale).round().clamp(0, 255)
        if self.zero == "dropped":
            zero = torch.zeros_like(zero)
        codes = ((x - least) / scale).round().clamp(0, 255).to(torch.uint8)
        return Encoded(codes, scale.to(METADATA), zero.to(METADATA))

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        codes, scale, zero = (part.to(dtype) for part in encoded)
        return (codes - zero) * scale


DROPPED_ZERO = Codec("dropped-zero", ZeroPointPlane("token", "dropped"), ZeroPointPlane("token", "dropped"))
CLAMPED_ZERO = Codec("clamped-zero", ZeroPointPlane("channel", "clamped"), ZeroPointPlane("token", "clamped"))
BROKEN = (DROPPED_ZERO, CLAMPED_ZERO)
