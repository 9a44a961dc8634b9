"""The codecs against a naive twin: every element within half a step, whatever the group looks like."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from bench.quant_broken import BROKEN
from engines.local.kv.quant import (
    INT4_KEYS,
    INT8_KEYS,
    LARGEST,
    UNIT,
    AffinePlane,
    Codec,
    Plane,
    codecs,
    fits,
    rotation,
)
from engines.local.kv.shapes import LayerShape, bytes_per_token

PLANES = {
    "int8 keys": INT8_KEYS,
    "int4 keys": INT4_KEYS,
    "int8 values": codecs(64)["int8"].value,
    "int4 values": codecs(64)["int4"].value,
    "int4 values, 96 channels": codecs(96)["int4"].value,
}
SIGNS = "1110101110111000000101001111001110011001100011101010110101000101"
SMOLLM2 = {layer: LayerShape(3, 64, 64) for layer in range(30)}


def _kv(units: int, heads: int = 3, dim: int = 64, seed: int = 0) -> Tensor:
    """Like keys of a real model: some channels large in every token and far from 0, one quiet, one constant."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(units, UNIT, heads, dim, generator=draw)
    x[..., 3] += 12.0
    x[..., 7] = x[..., 7] * 5 - 30.0
    x[..., 11] *= 1e-4
    x[..., 13] = 0.3
    return x


def _back(plane: Plane, x: Tensor) -> Tensor:
    decoded = plane.decode(plane.encode(x), torch.float32)
    return decoded @ rotation(x.shape[-1], x.device).T if plane.turned else decoded


def _naive(values: list[float], levels: int) -> tuple[list[float], float]:
    """One group, in float64 and plain Python -> what comes back, and half a step."""
    low = math.nextafter(min(values), -math.inf)
    half = np.float16(low)
    least = float(np.nextafter(half, np.float16(-np.inf)) if float(half) > low else half)
    step = (max(values) - least) / levels
    return [least + round((value - least) / step) * step if step else value for value in values], step / 2


@pytest.mark.parametrize("name", PLANES)
def test_every_element_is_within_half_a_step_of_the_naive_twin(name: str) -> None:
    plane = PLANES[name]
    assert isinstance(plane, AffinePlane)
    dim = 96 if "96" in name else 64
    x = _kv(1, heads=1, dim=dim)
    decoded = plane.decode(plane.encode(x), torch.float32)[0, :, 0]
    wanted = (x @ rotation(dim, x.device) if plane.turned else x)[0, :, 0]
    size = plane.group or dim
    groups = (
        [(slice(at, at + size), c) for at in range(0, UNIT, size) for c in range(dim)]
        if plane.by == "channel"
        else [(t, slice(at, at + size)) for t in range(UNIT) for at in range(0, dim, size)]
    )
    for group in groups:
        values = wanted[group].tolist()
        twin, half_step = _naive(values, 2**plane.bits - 1)
        bound = half_step * 1.002 + 3e-8 + 2e-6 * max(map(abs, values))  # fp16 steps are rounded up, float32 sums
        assert max(abs(a - b) for a, b in zip(decoded[group].tolist(), values, strict=True)) <= bound
        assert max(abs(a - b) for a, b in zip(twin, values, strict=True)) <= half_step * 1.0001


elements = st.one_of(
    st.floats(-LARGEST, LARGEST, width=32),
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**-20), 2.0**-20, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 2047.0, -65504 / 2, LARGEST, -LARGEST]),
)


@settings(max_examples=40, deadline=None)
@given(x=arrays.arrays(np.float32, (1, UNIT, 1, 4), elements=elements, fill=elements), bits=st.sampled_from([4, 8]))
@pytest.mark.parametrize("by", ["channel", "token"])
def test_no_group_comes_back_as_nan_or_beyond_half_a_stored_step(by: str, bits: int, x: np.ndarray) -> None:
    plane = AffinePlane(bits, by, 64 if by == "channel" else 4)  # type: ignore[arg-type]
    wanted = torch.from_numpy(x)
    assert fits(wanted)
    encoded = plane.encode(wanted)
    decoded = plane.decode(encoded, torch.float32)
    assert bool(decoded.isfinite().all())
    step = encoded.steps.float()[:, :, None] if by == "channel" else encoded.steps.float()[..., None]
    error = (
        (decoded - wanted).abs().view(1, 1, UNIT, 1, 4) if by == "channel" else (decoded - wanted).abs()[..., None, :]
    )
    assert bool((error <= step / 2 * 1.001 + wanted.abs().max() * 2e-6).all())


@pytest.mark.parametrize("name", ["int8 keys", "int4 keys", "int8 values"])
@pytest.mark.parametrize("value", [0.0, 0.3, -7.7, 900.1])
def test_constant_groups_come_back_as_they_were(name: str, value: float) -> None:
    x = torch.full((1, UNIT, 2, 64), value)
    assert torch.allclose(_back(PLANES[name], x), x, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("plane", PLANES.values(), ids=PLANES)
def test_a_unit_is_encoded_alone_as_among_others_and_decoded_units_encode_to_the_same_codes(plane: Plane) -> None:
    x = _kv(3, dim=96 if plane == PLANES["int4 values, 96 channels"] else 64)
    together, alone = plane.encode(x), plane.encode(x[1:2].clone())
    for part, own in zip(together, alone, strict=True):
        assert torch.equal(part[1:2], own)
    again = plane.encode(_back(plane, x))
    assert torch.equal(again.codes, together.codes)


@pytest.mark.parametrize(("name", "wanted"), [("int8", 12_240), ("k8v4", 9_360), ("int4", 6_840)])
def test_bytes_of_a_token_are_those_of_the_tensors_and_of_the_table(name: str, wanted: int) -> None:
    codec = codecs(64)[name]
    x = _kv(1)
    tensors = codec.key.encode(x).nbytes + codec.value.encode(x).nbytes
    assert tensors == codec.nbytes(3, 64, 64)
    assert (
        sum(codec.nbytes(shape.kv_heads, shape.key_dim, shape.value_dim) for shape in SMOLLM2.values()) == wanted * 64
    )
    assert bytes_per_token(SMOLLM2, torch.float16) == 23_040


def test_layouts_are_the_shapes_of_what_encode_gives() -> None:
    for dim in (64, 96, 128):
        for codec in codecs(dim).values():
            for plane in (codec.key, codec.value):
                encoded, layout = plane.encode(_kv(2, dim=dim)), plane.layout(3, dim)
                assert (encoded.codes.shape[1:], encoded.steps.shape[1:]) == layout
                assert encoded.lows.shape == encoded.steps.shape


def _error(codec: Codec, x: Tensor) -> float:
    return max(float((_back(plane, x) - x).norm() / x.norm()) for plane in (codec.key, codec.value))


BARS = {"int8": 0.02, "k8v4": 0.1, "int4": 0.1}  # relative error on `_kv`; half the spread of uniform noise, doubled


@pytest.mark.parametrize("name", BARS)
def test_codecs_meet_their_bar(name: str) -> None:
    assert _error(codecs(64)[name], _kv(4)) < BARS[name]


@pytest.mark.parametrize("codec", BROKEN, ids=lambda codec: codec.name)
def test_broken_codecs_fail_even_the_bar_of_four_bits(codec: Codec) -> None:
    assert _error(codec, _kv(4)) > 5 * BARS["int4"]


@pytest.mark.parametrize("dim", [2, 64, 128, 256])
def test_a_rotation_is_orthogonal_and_spreads_a_channel(dim: int) -> None:
    matrix = rotation(dim, torch.device("cpu"))
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim), atol=1e-6)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, dim**-0.5))


def test_the_signs_are_what_they_were() -> None:
    """A change would make every stored unit unreadable."""
    signs = (rotation(64, torch.device("cpu"))[:, 0] > 0).tolist()
    assert "".join("01"[sign] for sign in signs) == SIGNS


def test_what_fp16_metadata_cannot_hold_does_not_fit() -> None:
    for bad in (float("nan"), float("inf"), -70_000.0):
        x = torch.zeros(1, UNIT, 1, 2)
        x[0, 5, 0, 1] = bad
        assert not fits(x)
