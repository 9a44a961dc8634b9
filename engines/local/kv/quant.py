"""The codecs of sealed units: K/V of 64 tokens as 8-bit or 4-bit codes, encoded once and never again in place. Pure.

    x        [units, UNIT, heads, dim]                    keys after RoPE, values as they are
    codes    uint8 [units, UNIT, heads, dim * bits / 8]   4 bits: channel c | channel c + dim / 2 << 4
    steps, lows, fp16
      by channel   [units, UNIT / group, heads, dim]      one for a channel over `group` tokens
      by token     [units, UNIT, heads, dim / group]      one for a token over `group` channels

    x ~ code * step + low

Keys go by channel, for some of their channels are large in every token (KIVI, arXiv 2402.02750). Values go by token; at
4 bits they are turned by a Hadamard matrix first, which spreads outliers over all channels (QuaRot, arXiv 2404.00456).

`low` is the least of the group rounded down to fp16, and `step` is rounded up, so that the grid reaches over the whole
group and no code is cut off: an element comes back within half a stored step. A zero point as an integer cannot do
that where a group does not reach over 0. A constant group has step 0, or so small a one that it makes no difference.

What one codec is: two planes, one for keys and one for values. A plane knows one tensor; which unit gets which codec
is decided elsewhere (`precision`), where the codes lie too (`sealed`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

UNIT = 64  # tokens sealed together: one group of 8-bit keys, two of 4-bit keys
LARGEST = 60_000.0  # an element beyond cannot be held by fp16 lows and steps; such a unit is not sealed
SLACK = 2.0**-18  # of a step, for float32's own rounding: without it a grid point would ask for the next larger step
METADATA = torch.float16


class Encoded(NamedTuple):
    codes: Tensor
    steps: Tensor
    lows: Tensor

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


class PlaneLayout(NamedTuple):
    """Shapes of one unit's codes, and of its steps (the lows' are the same)."""

    codes: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        codes, steps = (torch.Size(shape).numel() for shape in self)
        return codes + 2 * steps * METADATA.itemsize


class Plane(Protocol):
    """How the keys, or the values, of a unit are held."""

    @property
    def turned(self) -> bool:
        """What `decode` gives is turned by `rotation(dim)`: `x @ rotation`."""
        ...

    def layout(self, heads: int, dim: int) -> PlaneLayout: ...

    def encode(self, x: Tensor) -> Encoded:
        """float [units, UNIT, heads, dim] -> codes and metadata."""
        ...

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        """[units, UNIT, heads, dim] in `dtype`, turned if the plane is."""
        ...


@dataclass(frozen=True, slots=True)
class AffinePlane:
    """`group` tokens (by channel) or channels (by token) share a step; 0: all channels."""

    bits: Literal[4, 8]
    by: Literal["channel", "token"]
    group: int
    turned: bool = False

    def layout(self, heads: int, dim: int) -> PlaneLayout:
        if dim % 2 and self.bits == 4:
            raise ValueError(f"{dim} channels a head are odd: two 4-bit codes share a byte")
        codes = (UNIT, heads, dim * self.bits // 8)
        if self.by == "channel":
            return PlaneLayout(codes, (UNIT // self.group, heads, dim))
        return PlaneLayout(codes, (UNIT, heads, dim // (self.group or dim)))

    def encode(self, x: Tensor) -> Encoded:
        x = x.float()
        if self.turned:
            x = x @ rotation(x.shape[-1], x.device)
        levels = 2**self.bits - 1
        grouped, axis = self._grouped(x)
        least, most = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
        lows = _rounded(least, -torch.inf)
        steps = _rounded((most - lows.float()) / levels * (1 - SLACK), torch.inf)
        divisor = torch.where(steps > 0, steps.float(), 1.0)
        codes = ((grouped - lows.float()) / divisor).round_().clamp_(0, levels).to(torch.uint8).view(x.shape)
        if self.bits == 4:
            low, high = codes.chunk(2, -1)
            codes = low | (high << 4)
        return Encoded(codes, steps.squeeze(axis), lows.squeeze(axis))

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        codes = encoded.codes
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), -1)
        x = codes.to(dtype)
        grouped, axis = self._grouped(x)
        grouped.mul_(encoded.steps.unsqueeze(axis).to(dtype)).add_(encoded.lows.unsqueeze(axis).to(dtype))
        return x

    def _grouped(self, x: Tensor) -> tuple[Tensor, int]:
        """A view of `x` with the groups along an axis of their own -> it, and the axis."""
        units, tokens, heads, dim = x.shape
        if self.by == "channel":
            return x.view(units, tokens // self.group, self.group, heads, dim), 2
        return x.view(units, tokens, heads, -1, self.group or dim), 4


@dataclass(frozen=True, slots=True)
class Codec:
    """`name` goes into every key of a stored unit: units of other codecs are not read."""

    name: str
    key: Plane
    value: Plane

    def nbytes(self, kv_heads: int, key_dim: int, value_dim: int) -> int:
        """Of one unit in one layer, metadata counted."""
        return self.key.layout(kv_heads, key_dim).nbytes + self.value.layout(kv_heads, value_dim).nbytes


INT8_KEYS = AffinePlane(8, "channel", 64)
INT4_KEYS = AffinePlane(4, "channel", 32)


def codecs(value_dim: int) -> Mapping[str, Codec]:
    """`int8`, `k8v4` and `int4` for values of `value_dim` channels."""
    int8_values = AffinePlane(8, "token", 0)
    power_of_two = value_dim & (value_dim - 1) == 0
    group = min(value_dim, 64) if power_of_two else max(g for g in range(1, 33) if value_dim % g == 0)
    int4_values = AffinePlane(4, "token", group, turned=power_of_two)
    return {
        "int8": Codec("int8", INT8_KEYS, int8_values),
        "k8v4": Codec("k8v4", INT8_KEYS, int4_values),
        "int4": Codec("int4", INT4_KEYS, int4_values),
    }


def fits(x: Tensor) -> bool:
    """Whether fp16 metadata can hold `x`: all finite, and none beyond LARGEST."""
    return bool((x.abs() <= LARGEST).all())  # NaN compares as no


@lru_cache(maxsize=16)
def rotation(dim: int, device: torch.device) -> Tensor:
    """float32 [dim, dim], orthogonal: a Hadamard matrix (Sylvester's) behind fixed random signs. `dim` a power of two.

    The signs come from SHAKE-128, so every process and every release has the same.
    """
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"a Hadamard matrix of {dim} rows is not built: not a power of two")
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    drawn = hashlib.shake_128(b"turnkeep value rotation").digest(dim)
    signs = torch.tensor([1.0 if byte & 1 else -1.0 for byte in drawn])
    return (signs[:, None] * matrix / math.sqrt(dim)).to(device)


def _rounded(x: Tensor, towards: float) -> Tensor:
    """float32 to fp16, never past `x` on the other side of `towards` (infinite)."""
    half = x.to(METADATA)
    past = half.float() > x if towards < 0 else half.float() < x
    half[past] = torch.nextafter(half, torch.full_like(half, towards))[past]
    return half
