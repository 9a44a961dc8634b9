"""Attention of query blocks over tiles of one precision, and the merging of what came of it (flash decoding).

A program of `partial` takes one query block, one KV head and one share of the block's tiles:

    rows of a block     | token 0, heads of the group | token 1, heads of the group | ...      BLOCK_M rows
    channels            two halves, c and c + dim / 2, as 4-bit codes are packed; so every precision reads alike
    a tile              TILE tokens of one page or unit, decoded in registers and dropped: SIZE of them are real

It leaves (most, total, out) of a softmax over its tiles; `merge` puts those of all precisions and shares together.
A row's share of tiles is fixed in length, not in number: what becomes of a row does not depend on its batch mates.
"""

import triton
import triton.language as tl


@triton.jit
def partial(
    Query,  # [tokens, heads, KEY_DIM]
    Keys, KeySteps, KeyLows,
    Values, ValueSteps, ValueLows,
    Tiles,  # int32 [tiles, 4]: place, position of its first token, first and last + 1 position that is meant
    Offsets,  # int32 [sequences + 1] into Tiles
    Blocks,  # int32 [blocks, 4]: sequence, first token in the batch, tokens, position of the first
    Out,  # float32 [slots, rows, heads, VALUE_DIM]
    Most,  # float32 [slots, rows, heads, 2]
    first_row, num_rows, slot, scale, softcap, window, share,
    query_token, query_head,
    key_place, key_token, key_head, key_step_place, key_step_group, key_step_head,
    value_place, value_token, value_head, value_step_place, value_step_token, value_step_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_HALF: tl.constexpr, VALUE_HALF: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr,
    TILE: tl.constexpr, SIZE: tl.constexpr, SUBS: tl.constexpr,
    SOFTCAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(Blocks + block * 4)
    first = tl.load(Blocks + block * 4 + 1)
    tokens = tl.load(Blocks + block * 4 + 2)
    position = tl.load(Blocks + block * 4 + 3)

    row = tl.arange(0, BLOCK_M)
    token, heads = row // GROUP, head * GROUP + row % GROUP
    alive = token < tokens
    half_k, half_v = tl.arange(0, KEY_HALF), tl.arange(0, VALUE_HALF)
    real_k, real_v = half_k < KEY_DIM // 2, half_v < VALUE_DIM // 2
    of_query = Query + (first + token)[:, None].to(tl.int64) * query_token + heads[:, None] * query_head
    here_k = alive[:, None] & real_k[None, :]
    query_low = tl.load(of_query + half_k[None, :], mask=here_k, other=0.0).to(DOT)
    query_high = tl.load(of_query + KEY_DIM // 2 + half_k[None, :], mask=here_k, other=0.0).to(DOT)
    at = position + token

    most = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out_low = tl.zeros([BLOCK_M, VALUE_HALF], tl.float32)
    out_high = tl.zeros([BLOCK_M, VALUE_HALF], tl.float32)
    begin = tl.load(Offsets + sequence) + split * share
    end = tl.minimum(begin + share, tl.load(Offsets + sequence + 1))
    last = position + tokens - 1
    in_tile = tl.arange(0, TILE)
    for i in range(begin, end):
        low = tl.load(Tiles + i * 4 + 2)
        high = tl.load(Tiles + i * 4 + 3)
        if (low <= last) & (high > position - window + 1):
            place = tl.load(Tiles + i * 4)
            here = tl.load(Tiles + i * 4 + 1) + in_tile
            meant = (in_tile < SIZE) & (here >= low) & (here < high)
            unit, inner = (place // SUBS).to(tl.int64), (place % SUBS) * SIZE + in_tile

            key_at = Keys + unit * key_place + head * key_head + inner[:, None] * key_token
            key_mask = meant[:, None] & real_k[None, :]
            if KEY_BITS == 4:
                codes = tl.load(key_at + half_k[None, :], mask=key_mask, other=0)
                key_low, key_high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
            else:
                key_low = tl.load(key_at + half_k[None, :], mask=key_mask, other=0)
                key_high = tl.load(key_at + KEY_DIM // 2 + half_k[None, :], mask=key_mask, other=0)
            if KEY_BITS < 16:  # a tile is one group of tokens: a step and a low for each channel
                step = unit * key_step_place + (place % SUBS) * key_step_group + head * key_step_head + half_k
                key_low = key_low.to(tl.float32) * tl.load(KeySteps + step, mask=real_k, other=0.0).to(tl.float32)
                key_low += tl.load(KeyLows + step, mask=real_k, other=0.0).to(tl.float32)
                step += KEY_DIM // 2
                key_high = key_high.to(tl.float32) * tl.load(KeySteps + step, mask=real_k, other=0.0).to(tl.float32)
                key_high += tl.load(KeyLows + step, mask=real_k, other=0.0).to(tl.float32)
            scores = tl.dot(query_low, tl.trans(key_low.to(DOT)), input_precision="ieee")
            scores += tl.dot(query_high, tl.trans(key_high.to(DOT)), input_precision="ieee")
            scores *= scale
            if SOFTCAP:  # softcap * tanh(scores / softcap)
                scores = softcap * (1.0 - 2.0 / (tl.exp(tl.minimum(scores / softcap * 2.0, 80.0)) + 1.0))
            seen = meant[None, :] & (here[None, :] <= at[:, None]) & (here[None, :] > at[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))

            above = tl.maximum(most, tl.max(scores, 1))
            calm = tl.where(above == -float("inf"), 0.0, above)
            before = tl.exp(most - calm)
            weights = tl.exp(scores - calm[:, None])
            total = total * before + tl.sum(weights, 1)
            most = above

            value_at = Values + unit * value_place + head * value_head + inner[:, None] * value_token
            value_mask = meant[:, None] & real_v[None, :]  # what nobody wrote may be NaN, and 0 * NaN is NaN
            if VALUE_BITS == 4:
                codes = tl.load(value_at + half_v[None, :], mask=value_mask, other=0)
                value_low, value_high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
            else:
                value_low = tl.load(value_at + half_v[None, :], mask=value_mask, other=0)
                value_high = tl.load(value_at + VALUE_DIM // 2 + half_v[None, :], mask=value_mask, other=0)
            if VALUE_BITS < 16:
                step = unit * value_step_place + head * value_step_head + inner[:, None] * value_step_token
                low_at = step + half_v[None, :] // VALUE_GROUP
                high_at = step + (VALUE_DIM // 2 + half_v[None, :]) // VALUE_GROUP
                value_low = value_low.to(tl.float32) * tl.load(ValueSteps + low_at, mask=value_mask, other=0.0)
                value_low += tl.load(ValueLows + low_at, mask=value_mask, other=0.0).to(tl.float32)
                value_high = value_high.to(tl.float32) * tl.load(ValueSteps + high_at, mask=value_mask, other=0.0)
                value_high += tl.load(ValueLows + high_at, mask=value_mask, other=0.0).to(tl.float32)
            parts = weights.to(DOT)
            out_low = out_low * before[:, None] + tl.dot(parts, value_low.to(DOT), input_precision="ieee")
            out_high = out_high * before[:, None] + tl.dot(parts, value_high.to(DOT), input_precision="ieee")

    into = ((slot + split) * num_rows + first - first_row + token).to(tl.int64) * HEADS + heads
    tl.store(Most + into * 2, most, mask=alive)
    tl.store(Most + into * 2 + 1, total, mask=alive)
    here_v = alive[:, None] & real_v[None, :]
    tl.store(Out + into[:, None] * VALUE_DIM + half_v[None, :], out_low, mask=here_v)
    tl.store(Out + into[:, None] * VALUE_DIM + VALUE_DIM // 2 + half_v[None, :], out_high, mask=here_v)


@triton.jit
def merge(
    Parts,  # float32 [slots, rows, heads, DIM]
    Most,  # float32 [slots, rows, heads, 2]
    Sinks,  # [heads]
    Plain,  # [rows, heads, DIM]
    Turned,  # float32 [rows, heads, DIM]: the share of values that lie turned, to be turned back
    num_rows, turned_from, slots,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SINKS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A sink is a logit that takes weight and gives nothing. A row without any token (padding) gives zeros."""
    row, head = tl.program_id(0), tl.program_id(1)
    channel = tl.arange(0, PADDED)
    real = channel < DIM
    most = tl.full([1], -float("inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    if SINKS:
        most = tl.zeros([1], tl.float32) + tl.load(Sinks + head).to(tl.float32)
        total += 1.0
    plain = tl.zeros([PADDED], tl.float32)
    turned = tl.zeros([PADDED], tl.float32)
    one = tl.arange(0, 1)
    for slot in range(slots):
        at = (slot * num_rows + row).to(tl.int64) * HEADS + head
        part_most = tl.load(Most + at * 2 + one)
        above = tl.maximum(most, part_most)
        calm = tl.where(above == -float("inf"), 0.0, above)
        before, now = tl.exp(most - calm), tl.exp(part_most - calm)
        total = total * before + tl.load(Most + at * 2 + 1 + one) * now
        most = above
        part = tl.load(Parts + at * DIM + channel, mask=real, other=0.0) * now
        if slot < turned_from:
            plain = plain * before + part
            turned = turned * before
        else:
            plain = plain * before
            turned = turned * before + part
    total = tl.where(total == 0.0, 1.0, total)
    into = (row * HEADS + head).to(tl.int64) * DIM + channel
    tl.store(Plain + into, (plain / total).to(Plain.dtype.element_ty), mask=real)
    if TURNED:
        tl.store(Turned + into, turned / total, mask=real)
