"""The sealing kernels give the bits of the torch codecs; the append kernel writes what it is given, and no padding."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from engines.local.kv.quant import METADATA, UNIT, AffinePlane, Encoded, Plane, codecs

pytest.importorskip("triton")

from engines.local.kernels.attend import write
from engines.local.kernels.seal import encode_into
from engines.local.kv.shapes import LayerShape
from engines.local.kv.storage import KVStorage

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
HEADS = 2


def _planes(dim: int) -> list[Plane]:
    return list(dict.fromkeys(plane for codec in codecs(dim).values() for plane in (codec.key, codec.value)))


def _awkward(dim: int) -> Tensor:
    """[2, UNIT, HEADS, dim]: large, small and constant channels, one beyond 0; subnormal and zero ones."""
    x = torch.randn(2, UNIT, HEADS, dim, generator=torch.Generator().manual_seed(dim))
    x[0, :, 0, 1] *= 300.0
    x[0, :, 0, 2] = 7.3
    x[0, :, 1, 3] += 900.0
    x[0, 5] = -0.25
    x[1] *= 3e-6  # fp16 steps and lows below its normal numbers
    x[1, :, 1] = 0.0
    x[1, 0, 0, 0] = 59_000.0
    return x


@pytest.mark.parametrize("dim", [64, 80])
def test_units_are_encoded_bit_for_bit_as_the_codecs_do(dim: int) -> None:
    x = _awkward(dim)
    for plane in _planes(dim):
        assert isinstance(plane, AffinePlane)
        layout = plane.layout(HEADS, dim)
        shapes = ((layout.codes, torch.uint8), (layout.steps, METADATA), (layout.steps, METADATA))
        # as in an arena: a unit is one run of bytes, and others lie between
        room = [torch.zeros(len(x), 2, *shape, dtype=dtype, device=DEVICE) for shape, dtype in shapes]
        into = Encoded(*(part[:, 1] for part in room))
        encode_into(plane, x.to(DEVICE), into)
        wanted = plane.encode(x)
        for name, got, want in zip(Encoded._fields, into, wanted, strict=True):
            assert torch.equal(got.cpu(), want), (plane, name)
        assert not any(bool(part[:, 0].any()) for part in room)


def test_new_keys_and_values_go_to_their_slots_and_padding_nowhere() -> None:
    shapes = {0: LayerShape(2, 24, 40)}
    storage = KVStorage(shapes, 3, 16, dtype=torch.float32, device=DEVICE)
    slots = torch.tensor([17, -1, 63, 40], device=DEVICE)
    key, value = torch.randn(2, 4, 24, device=DEVICE), torch.randn(2, 4, 40, device=DEVICE)
    write(storage, 0, slots, key.transpose(0, 1), value.transpose(0, 1))
    kept = slots >= 0
    for got, given in ((storage.key_slots[0], key), (storage.value_slots[0], value)):
        assert torch.equal(got[slots[kept]], given.transpose(0, 1)[kept])
        assert int(got.flatten(1).any(1).sum()) == 3
