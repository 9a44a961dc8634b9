"""The tensors of sealed units: codes and metadata of all layers, one arena a precision. Knows no books.

arena   uint8 [units, unit_bytes]           a unit is one run of bytes: it can be moved, or stored, whole
unit    | group 0: key codes, steps, lows, value codes, steps, lows | group 1 ... |
group   layers of one shape: key codes [layers, UNIT, kv_heads, key_dim * bits / 8], and so on
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.local.kv.memory import reserve
from engines.local.kv.precision import Precision
from engines.local.kv.quant import METADATA, UNIT, Codec, Encoded, Plane, fits, rotation
from engines.local.kv.shapes import LayerShape

ALIGN = 64  # bytes of a unit
CPU = torch.device("cpu")
Codecs = Callable[[int], Mapping[str, Codec]]  # by value_dim
Encode = Callable[[Plane, Tensor, Encoded], None]  # [units, UNIT, heads, dim] to where it is to lie


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one shape; `key` and `value` view the arena as [units, layers, ...]."""

    layers: tuple[int, ...]
    shape: LayerShape
    codec: Codec
    key: Encoded
    value: Encoded


def groups(shapes: Mapping[int, LayerShape]) -> dict[LayerShape, tuple[int, ...]]:
    """Layers by shape."""
    found: dict[LayerShape, list[int]] = {}
    for layer, shape in shapes.items():
        found.setdefault(shape, []).append(layer)
    return {shape: tuple(layers) for shape, layers in found.items()}


def unit_bytes(shapes: Mapping[int, LayerShape], codecs: Codecs, precision: Precision) -> int:
    """Of one unit in all layers, metadata counted."""
    nbytes = 0
    for shape in shapes.values():
        nbytes += codecs(shape.value_dim)[precision.codec].nbytes(shape.kv_heads, shape.key_dim, shape.value_dim)
    return -(-nbytes // ALIGN) * ALIGN


def encode_into(plane: Plane, x: Tensor, into: Encoded) -> None:
    """The reference; kernels.seal has another."""
    for part, encoded in zip(into, plane.encode(x), strict=True):
        part.copy_(encoded)


class Arena:
    """Room for `units` units of one precision."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        codecs: Codecs,
        precision: Precision,
        units: int,
        encode: Encode = encode_into,
        device: torch.device = CPU,
    ) -> None:
        self._encode = encode
        self.unit_bytes = unit_bytes(shapes, codecs, precision)
        self._memory = reserve(units * self.unit_bytes, device)
        self.bytes = self._memory.bytes.view(units, self.unit_bytes)
        self.groups: list[Group] = []
        self._at: dict[int, tuple[Group, int]] = {}  # layer -> its group, and its place there
        start = 0
        for shape, layers in groups(shapes).items():
            codec = codecs(shape.value_dim)[precision.codec]
            key, start = self._plane(start, codec.key, len(layers), shape.kv_heads, shape.key_dim)
            value, start = self._plane(start, codec.value, len(layers), shape.kv_heads, shape.value_dim)
            group = Group(layers, shape, codec, key, value)
            self.groups.append(group)
            self._at |= {layer: (group, place) for place, layer in enumerate(layers)}
        assert start <= self.unit_bytes

    def _plane(self, start: int, plane: Plane, layers: int, heads: int, dim: int) -> tuple[Encoded, int]:
        layout = plane.layout(heads, dim)
        parts: list[Tensor] = []
        for shape, dtype in ((layout.codes, torch.uint8), (layout.steps, METADATA), (layout.steps, METADATA)):
            stop = start + layers * math.prod(shape) * dtype.itemsize
            parts.append(self.bytes[:, start:stop].view(dtype).view(len(self.bytes), layers, *shape))
            start = stop
        return Encoded(*parts), start

    def write(self, unit: int, read: Callable[[int], tuple[Tensor, Tensor]]) -> bool:
        """Encode what `read(layer)` gives (keys and values [UNIT, kv_heads, dim]) into `unit`; False and the unit is
        not to be used where the metadata cannot hold it."""
        for group in self.groups:
            pairs = [read(layer) for layer in group.layers]
            for plane, into, x in (
                (group.codec.key, group.key, torch.stack([key for key, _ in pairs])),
                (group.codec.value, group.value, torch.stack([value for _, value in pairs])),
            ):
                if not fits(x):
                    return False
                self._encode(plane, x, Encoded(*(part[unit] for part in into)))
        return True

    def read(self, layer: int, units: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [units, UNIT, kv_heads, dim] of `units` (int64); values turned where their plane is."""
        group, place = self._at[layer]
        key, value = (
            Encoded(*(part[:, place].index_select(0, units) for part in own)) for own in (group.key, group.value)
        )
        return group.codec.key.decode(key, dtype), group.codec.value.decode(value, dtype)

    def planes(self, layer: int) -> tuple[Codec, Encoded, Encoded]:
        """The layer's codec, and its keys and values of all units: codes [units, UNIT, kv_heads, ...], as they lie."""
        group, place = self._at[layer]
        key, value = (Encoded(*(part[:, place] for part in own)) for own in (group.key, group.value))
        return group.codec, key, value

    def turn(self, layer: int) -> Tensor | None:
        """float32 [value_dim, value_dim] that the layer's values were turned by; None: they were not."""
        group, _ = self._at[layer]
        return rotation(group.shape.value_dim, self.bytes.device) if group.codec.value.turned else None

    def zero(self, unit: int, start: int, stop: int) -> None:
        """Leave nothing of tokens start ... stop of a unit, but for the steps and lows that other tokens share."""
        for group in self.groups:
            for plane in (group.key, group.value):
                for part in plane:
                    if part.shape[2] == UNIT:
                        part[unit, :, start:stop] = 0

    def discard(self, unit: int) -> None:
        self.bytes[unit] = 0  # the system takes back whole pages only, and elsewhere none
        self._memory.discard(unit * self.unit_bytes, (unit + 1) * self.unit_bytes)
