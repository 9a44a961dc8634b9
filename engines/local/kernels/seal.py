"""The host's side of the sealing kernels: what `Plane.encode` gives, written where it is to lie."""

from __future__ import annotations

import triton
from torch import Tensor

from engines.local.kernels.device.seal import codes, grid
from engines.local.kv.quant import SLACK, UNIT, AffinePlane, Encoded, Plane, rotation


def encode_into(plane: Plane, x: Tensor, into: Encoded) -> None:
    """`x` [units, UNIT, heads, dim], finite and within quant.LARGEST -> `into`, bit for bit as `plane.encode(x)`.

    Values are turned by torch's own product, whose order of sums no kernel of ours could repeat.
    """
    if not isinstance(plane, AffinePlane):
        raise ValueError(f"the kernels write affine planes, not {plane}")
    x = x.float()
    if plane.turned:
        x = x @ rotation(x.shape[-1], x.device)
    x = x.contiguous()
    units, tokens, heads, dim = x.shape
    assert tokens == UNIT
    by_channel = plane.by == "channel"
    group = plane.group or dim
    levels = float(2**plane.bits - 1)
    steps = into.steps.stride()
    grid[(units, heads, (UNIT if by_channel else dim) // group)](
        x, into.steps, into.lows, *steps[:3], levels, 1 - SLACK,
        TOKENS=UNIT, HEADS=heads, DIM=dim, GROUP=group,
        PADDED=triton.next_power_of_2(dim if by_channel else group), BY_CHANNEL=by_channel,
    )  # fmt: skip
    codes[(units, heads)](
        x, into.steps, into.lows, into.codes, *steps[:3], *into.codes.stride()[:3], levels,
        TOKENS=UNIT, HEADS=heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2),
        TOKEN_GROUP=group if by_channel else 1, CHANNEL_GROUP=1 if by_channel else group, BITS=plane.bits,
    )  # fmt: skip
