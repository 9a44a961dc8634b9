"""The host's side of the attention kernels: one call a layer, over tiles and blocks that are on the device already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.local.kernels.device.append import append
from engines.local.kernels.device.attend import merge, partial
from engines.local.kv.precision import Precision
from engines.local.kv.quant import UNIT, AffinePlane, Encoded, Plane
from engines.local.kv.storage import KVStorage
from engines.local.partial import Scores

FEWEST_ROWS = 16  # of a block: tl.dot takes no less
WIDE_BYTES = 256  # 128 channels of 16 bits, 64 of float32
SPLIT_TOKENS = 512  # of a decoding row's K/V that one program takes
EVERYTHING = 1 << 30  # a window that hides nothing
DOT = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True, slots=True)
class DeviceTiles:
    """tiles.Tiles on the device. A program takes `share` tiles of a row, `splits` programs take all of the longest."""

    tiles: Tensor
    offsets: Tensor
    share: int
    splits: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Query blocks that run as one: all decoding rows, or all chunks. Tokens first ... first + rows of the batch."""

    blocks: Tensor
    first: int
    rows: int
    block_rows: int  # of (token, head of the group)
    group: int  # the largest that the blocks have rows for
    tiles: Mapping[Precision, DeviceTiles]


def padded(dim: int) -> int:
    """A power of two from 16 on: what tl.arange and tl.dot take."""
    return max(16, int(triton.next_power_of_2(dim)))


def wide(dtype: torch.dtype, *dims: int) -> bool:
    """Whether a row of a head takes so many bytes that a block must have fewer rows to fit a multiprocessor."""
    return dtype.itemsize * max(dims) > WIDE_BYTES


def tile_tokens(key: Plane) -> int:
    """Tokens of a unit that share a step of the keys."""
    if not isinstance(key, AffinePlane) or key.by != "channel":
        raise ValueError(f"the kernels read keys by channel, not {key}")
    return key.group


def write(storage: KVStorage, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """`key` and `value` [tokens, kv_heads, dim] to `slots` int64 [tokens]; a slot below 0 is not written."""
    tokens, heads, key_dim = key.shape
    value_dim = value.shape[2]
    key, value = _dense(key), _dense(value)
    append[(tokens, heads)](
        key, value, slots, storage.keys[layer], storage.values[layer],
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        HEADS=heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_PADDED=triton.next_power_of_2(key_dim), VALUE_PADDED=triton.next_power_of_2(value_dim),
    )  # fmt: skip


def attend(storage: KVStorage, layer: int, launch: Launch, query: Tensor, scores: Scores, into: Tensor) -> None:
    """`query` [heads, tokens, key_dim] of the whole batch -> rows of `into` [tokens, heads, value_dim], contiguous.

    A query sees K/V up to its own position, no further back than the window, softcap and sinks as the reference has
    them (partial.attend_parts).
    """
    heads, key_dim = query.shape[0], query.shape[2]
    kv_heads, value_dim = storage.values[layer].shape[2:]
    assert heads // kv_heads <= launch.group, "a group that the blocks have no rows for"
    query = _dense(query)
    plain = {p: t for p, t in launch.tiles.items() if not turned(storage, layer, p)}
    ordered = plain | {p: t for p, t in launch.tiles.items() if p not in plain}
    slots = sum(tiles.splits for tiles in ordered.values())
    parts = query.new_empty((slots, launch.rows, heads, value_dim), dtype=torch.float32)
    most = query.new_empty((slots, launch.rows, heads, 2), dtype=torch.float32)
    slot = 0
    for precision, tiles in ordered.items():
        layout = Layout.of(storage, layer, precision)
        partial[(len(launch.blocks), kv_heads, tiles.splits)](
            query, *layout.key, *layout.value, tiles.tiles, tiles.offsets, launch.blocks, parts, most,
            launch.first, launch.rows, slot, scores.scale, scores.softcap or 1.0, scores.window or EVERYTHING,
            tiles.share, query.stride(1), query.stride(0), *layout.key_strides, *layout.value_strides,
            HEADS=heads, GROUP=heads // kv_heads, BLOCK_M=launch.block_rows, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            KEY_HALF=padded(key_dim // 2), VALUE_HALF=padded(value_dim // 2),
            KEY_BITS=layout.key_bits, VALUE_BITS=layout.value_bits, VALUE_GROUP=layout.value_group,
            TILE=padded(layout.tokens), SIZE=layout.tokens, SUBS=layout.subs,
            SOFTCAP=scores.softcap is not None, DOT=DOT[query.dtype],
            num_warps=8 if launch.block_rows * value_dim >= 8192 else 4,
            num_stages=1 if wide(query.dtype, key_dim, value_dim) else 2,
        )  # fmt: skip
        slot += tiles.splits
    turn_back = [p for p in ordered if p not in plain]
    out = into[launch.first : launch.first + launch.rows]
    first = torch.empty_like(out, dtype=torch.float32) if turn_back else out
    second = torch.empty_like(first) if turn_back else first
    sinks = scores.sinks if scores.sinks is not None else most
    merge[(launch.rows, heads)](
        parts, most, sinks, first, second, launch.rows, sum(t.splits for t in plain.values()), slots,
        HEADS=heads, DIM=value_dim, PADDED=triton.next_power_of_2(value_dim),
        SINKS=scores.sinks is not None, TURNED=bool(turn_back),
    )  # fmt: skip
    if turn_back:
        turn = storage.arenas[turn_back[0]].turn(layer)
        assert turn is not None
        out.copy_(first + second @ turn.T)


def turned(storage: KVStorage, layer: int, precision: Precision) -> bool:
    return precision != Precision.FULL and storage.arenas[precision].planes(layer)[0].value.turned


@dataclass(frozen=True, slots=True)
class Layout:
    """How one layer's K/V of one precision lies, as the kernel's arguments."""

    key: Encoded  # of full pages: the pages thrice, and steps and lows are not read
    value: Encoded
    key_strides: tuple[int, ...]  # place, token, head of codes; place, group, head of steps
    value_strides: tuple[int, ...]  # the same, with a token for the group
    key_bits: int
    value_bits: int
    value_group: int  # channels that share a step
    tokens: int  # of a tile
    subs: int  # tiles of a place

    @classmethod
    def of(cls, storage: KVStorage, layer: int, precision: Precision) -> Layout:
        if precision == Precision.FULL:
            key, value = storage.keys[layer], storage.values[layer]
            return cls(
                Encoded(key, key, key), Encoded(value, value, value),
                (*key.stride()[:3], 0, 0, 0), (*value.stride()[:3], 0, 0, 0),
                16, 16, value.shape[3], storage.block_size, 1,
            )  # fmt: skip
        codec, key_part, value_part = storage.arenas[precision].planes(layer)
        tokens = tile_tokens(codec.key)
        value_plane = codec.value
        if not isinstance(value_plane, AffinePlane) or value_plane.by != "token":
            raise ValueError(f"the kernels read values by token, not {value_plane}")
        assert isinstance(codec.key, AffinePlane)
        value_dim = storage.values[layer].shape[3]
        return cls(
            key_part, value_part, _strides(key_part), _strides(value_part),
            codec.key.bits, value_plane.bits, value_plane.group or value_dim, tokens, UNIT // tokens,
        )  # fmt: skip


def _strides(part: Encoded) -> tuple[int, ...]:
    return (*part.codes.stride()[:3], *part.steps.stride()[:3])


def _dense(x: Tensor) -> Tensor:
    """The kernels take any strides but for the last: channels stand side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
