"""Encoding of units as quant.AffinePlane does it, operation by operation, so that the bits are the same.

grid     steps and lows of each group: the least rounded down to fp16, the step rounded up
codes    (x - low) / step, to the nearest, ties to even; two 4-bit codes a byte
"""

import triton
import triton.language as tl


@triton.jit
def _down(x):
    """float32 to fp16, not above x."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    # the next one below: of a positive number the bits less one, of a negative one more, of a zero the least negative
    below = tl.where(half > 0, bits - 1, tl.where(half < 0, bits + 1, -32767)).to(tl.int16)
    return tl.where(half.to(tl.float32) > x, below.to(tl.float16, bitcast=True), half)


@triton.jit
def _up(x):
    """float32 to fp16, not below x."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    above = tl.where(half > 0, bits + 1, tl.where(half < 0, bits - 1, 1)).to(tl.int16)
    return tl.where(half.to(tl.float32) < x, above.to(tl.float16, bitcast=True), half)


@triton.jit
def grid(
    X,  # [units, TOKENS, HEADS, DIM]
    Steps, Lows,
    step_unit, step_token, step_head,
    levels, tight,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, PADDED: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    unit, head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if BY_CHANNEL:  # GROUP tokens, all channels
        token, channel = group * GROUP + tl.arange(0, GROUP), tl.arange(0, PADDED)
        real = channel[None, :] < DIM
    else:  # all tokens, GROUP channels
        token, channel = tl.arange(0, TOKENS), group * GROUP + tl.arange(0, PADDED)
        real = channel[None, :] < (group + 1) * GROUP
    real = real & (token[:, None] < TOKENS)
    at = ((unit * TOKENS + token[:, None]) * HEADS + head).to(tl.int64) * DIM + channel[None, :]
    x = tl.load(X + at, mask=real, other=0.0).to(tl.float32)
    axis: tl.constexpr = 0 if BY_CHANNEL else 1
    least = tl.min(tl.where(real, x, float("inf")), axis)
    most = tl.max(tl.where(real, x, -float("inf")), axis)
    if BY_CHANNEL:
        into = unit.to(tl.int64) * step_unit + group * step_token + head * step_head + channel
        there = channel < DIM
        least, most = tl.where(there, least, 0.0), tl.where(there, most, 0.0)
    else:
        into = unit.to(tl.int64) * step_unit + token * step_token + head * step_head + group
        there = token < TOKENS
    low = _down(least)
    step = _up(tl.div_rn(most - low.to(tl.float32), levels) * tight)
    tl.store(Steps + into, step, mask=there)
    tl.store(Lows + into, low, mask=there)


@triton.jit
def _coded(x, step, low, levels):
    divisor = tl.where(step > 0, step, 1.0)
    whole = tl.div_rn(x - low, divisor)
    whole = tl.minimum(tl.maximum(whole, -1.0), 256.0)  # the sum below rounds to the nearest, ties to even, up to 2^22
    return tl.minimum(tl.maximum((whole + 12582912.0) - 12582912.0, 0.0), levels).to(tl.int32)


@triton.jit
def codes(
    X,  # [units, TOKENS, HEADS, DIM]
    Steps, Lows, Codes,
    step_unit, step_token, step_head,
    code_unit, code_token, code_head,
    levels,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    TOKEN_GROUP: tl.constexpr, CHANNEL_GROUP: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A step is shared by TOKEN_GROUP tokens and CHANNEL_GROUP channels."""
    unit, head = tl.program_id(0), tl.program_id(1)
    token, channel = tl.arange(0, TOKENS), tl.arange(0, HALF)
    real = (channel[None, :] < DIM // 2) & (token[:, None] < TOKENS)
    at = ((unit * TOKENS + token[:, None]) * HEADS + head).to(tl.int64) * DIM + channel[None, :]
    step = unit.to(tl.int64) * step_unit + (token[:, None] // TOKEN_GROUP) * step_token + head * step_head
    low_at = step + channel[None, :] // CHANNEL_GROUP
    high_at = step + (channel[None, :] + DIM // 2) // CHANNEL_GROUP
    low = _coded(
        tl.load(X + at, mask=real, other=0.0).to(tl.float32),
        tl.load(Steps + low_at, mask=real, other=0.0).to(tl.float32),
        tl.load(Lows + low_at, mask=real, other=0.0).to(tl.float32),
        levels,
    )
    high = _coded(
        tl.load(X + at + DIM // 2, mask=real, other=0.0).to(tl.float32),
        tl.load(Steps + high_at, mask=real, other=0.0).to(tl.float32),
        tl.load(Lows + high_at, mask=real, other=0.0).to(tl.float32),
        levels,
    )
    into = Codes + unit.to(tl.int64) * code_unit + token[:, None] * code_token + head * code_head + channel[None, :]
    if BITS == 4:
        tl.store(into, (low | (high << 4)).to(tl.uint8), mask=real)
    else:
        tl.store(into, low.to(tl.uint8), mask=real)
        tl.store(into + DIM // 2, high.to(tl.uint8), mask=real)
