"""Attention over pages of several precisions: part by part and merged, against all of it at once."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.local.kv.precision import SEALED, Precision
from engines.local.kv.quant import UNIT, codecs
from engines.local.kv.sealed import unit_bytes
from engines.local.kv.shapes import LayerShape
from engines.local.kv.spans import MixedSpan
from engines.local.kv.storage import KVStorage
from engines.local.kv.units import Units
from engines.local.partial import PIECE, Scores, attend_parts

HEADS, KV_HEADS, DIM, SIZE, PAGES = 6, 2, 16, 16, 40
EACH = UNIT // SIZE
SHAPES = {0: LayerShape(KV_HEADS, DIM, DIM), 1: LayerShape(KV_HEADS, DIM, DIM), 2: LayerShape(1, DIM, 2 * DIM)}


def _storage() -> tuple[KVStorage, Units]:
    sizes = {precision: unit_bytes(SHAPES, codecs, precision) for precision in SEALED}
    page_bytes = sum(shape.elements for shape in SHAPES.values()) * 4 * SIZE
    units = Units(PAGES, EACH, page_bytes, sizes)
    made = KVStorage(SHAPES, PAGES, SIZE, dtype=torch.float32, device=torch.device("cpu"), units=units)
    draw = torch.Generator().manual_seed(3)
    for layer in SHAPES:
        for pages in (made.keys[layer], made.values[layer]):
            pages[1:] = torch.randn(pages[1:].shape, generator=draw)
    return made, units


def _mixed(storage: KVStorage, units: Units) -> np.ndarray:
    """full | INT8 INT8 | INT4 | full | second half of a K8V4 unit | full, its last page half full"""
    pages = np.arange(1, PAGES + 1, dtype=np.int32)
    table = [*pages[:EACH]]
    sealing = [(EACH, Precision.INT8), (2 * EACH, Precision.INT8), (3 * EACH, Precision.INT4)]
    for start, precision in sealing:
        target = units.take(precision)
        assert target is not None
        assert storage.seal(pages[start : start + EACH], target)
        table += [*target]
    table += [*pages[4 * EACH : 4 * EACH + 2]]
    target = units.take(Precision.K8V4)
    assert target is not None
    assert storage.seal(pages[5 * EACH : 6 * EACH], target)
    table += [*target[EACH // 2 :], *pages[6 * EACH : 6 * EACH + 2]]
    return np.array(table, np.int64)


def _decoded(storage: KVStorage, layer: int, span: MixedSpan) -> tuple[Tensor, Tensor]:
    """All keys and values [kv_heads, length, dim], decoded and turned back."""
    keys, values = [], []
    for part in span.parts:
        key, value, turn = storage.read_part(layer, part, 0, part.length)
        keys.append(key)
        values.append(value if turn is None else value @ turn.T)
    return torch.cat(keys, 1), torch.cat(values, 1)


def _plain(key: Tensor, value: Tensor, query: Tensor, first: int, scores: Scores) -> Tensor:
    """All at once, in float64."""
    kv_heads, group, tokens, _ = query.shape
    logits = torch.einsum("hgtd,hkd->hgtk", query.double(), key.double()) * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    position, at = torch.arange(first, first + tokens)[:, None], torch.arange(key.shape[1])
    hidden = at > position
    if scores.window is not None:
        hidden |= at <= position - scores.window
    logits = logits.masked_fill(hidden, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.double().view(kv_heads, group, 1, 1).expand(-1, -1, tokens, 1)
        logits = torch.cat((logits, sinks), -1)
    weights = torch.softmax(logits, -1)[..., : key.shape[1]]
    return torch.einsum("hgtk,hkd->hgtd", weights, value.double()).float()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 70, 6])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("layer", SHAPES)
def test_parts_merged_are_plain_attention(
    layer: int, tokens: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    storage, units = _storage()
    table = _mixed(storage, units)
    length = len(table) * SIZE - SIZE // 2
    span = storage.span(table, length)
    assert isinstance(span, MixedSpan)
    assert sum(part.length for part in span.parts) == length
    draw = torch.Generator().manual_seed(4)
    kv_heads = SHAPES[layer].kv_heads
    query = torch.randn(kv_heads, HEADS // kv_heads, tokens, DIM, generator=draw)
    given = torch.randn(HEADS, generator=draw) if sinks else None
    scores = Scores(DIM**-0.5, window, softcap, given)
    wanted = _plain(*_decoded(storage, layer, span), query, length - tokens, scores)
    got = attend_parts(storage, layer, span, query, length - tokens, scores)
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-6)


def test_parts_are_as_long_as_may_be_and_say_where_they_lie() -> None:
    storage, units = _storage()
    span = storage.span(_mixed(storage, units)[:20], 20 * SIZE)
    assert isinstance(span, MixedSpan)
    told = [(part.start, part.length, part.precision, part.skip) for part in span.parts]
    full, int8, k8v4, int4 = Precision.FULL, Precision.INT8, Precision.K8V4, Precision.INT4
    assert told == [
        (0, 64, full, 0),
        (64, 128, int8, 0),
        (192, 64, int4, 0),
        (256, 32, full, 0),
        (288, 32, k8v4, 32),
    ]


def test_more_than_a_piece_is_decoded_piece_by_piece() -> None:
    storage, units = _storage()
    source = np.arange(1, EACH + 1, dtype=np.int32)
    table: list[int] = []
    for _ in range(2 * PIECE // UNIT):
        pages = units.take(Precision.INT4)
        assert pages is not None
        assert storage.seal(source, pages)
        table += pages.tolist()
    long = np.array(table, np.int64)
    asked: list[int] = []
    read = storage.arenas[Precision.INT4].read

    def noted(layer: int, which: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        asked.append(len(which))
        return read(layer, which, dtype)

    storage.arenas[Precision.INT4].read = noted  # type: ignore[method-assign]
    span = storage.span(long, len(long) * SIZE)
    assert isinstance(span, MixedSpan)
    attend_parts(storage, 0, span, torch.randn(KV_HEADS, 3, 1, DIM), span.length - 1, Scores(0.25, None, None, None))
    assert max(asked) * UNIT == PIECE
    assert sum(asked) * UNIT == span.length


@pytest.mark.parametrize("precision", SEALED)
def test_what_is_sealed_is_what_was_there_up_to_the_codec(precision: Precision) -> None:
    storage, units = _storage()
    source, target = np.arange(1, EACH + 1, dtype=np.int32), units.take(precision)
    assert target is not None
    assert storage.seal(source, target)
    span = storage.span(target.astype(np.int64), UNIT)
    assert isinstance(span, MixedSpan)
    for layer in SHAPES:
        key, value = _decoded(storage, layer, span)
        pairs = ((key, storage.keys), (value, storage.values))
        for x, pages in pairs:
            was = pages[layer][1 : EACH + 1].flatten(0, 1).transpose(0, 1)
            assert float((x - was).norm() / was.norm()) < (0.02 if precision == Precision.INT8 else 0.2)


def test_a_unit_that_metadata_cannot_hold_is_not_sealed_and_going_down_twice_keeps_the_keys_of_eight_bits() -> None:
    storage, units = _storage()
    source, int8, k8v4 = np.arange(1, EACH + 1, dtype=np.int32), units.take(Precision.INT8), units.take(Precision.K8V4)
    assert int8 is not None
    assert k8v4 is not None
    assert storage.seal(source, int8)
    assert storage.seal(int8, k8v4)
    first, second = (storage.arenas[p].groups[0].key for p in (Precision.INT8, Precision.K8V4))
    assert torch.equal(first.codes[0], second.codes[0])
    storage.values[1][2, 3, 0, 0] = 1e6
    refused = units.take(Precision.INT4)
    assert refused is not None
    assert not storage.seal(source, refused)


def test_pages_that_nobody_needs_give_their_memory_back() -> None:
    storage, units = _storage()
    storage.freed(np.arange(3, 31, dtype=np.int32))
    page_bytes = storage.keys[0][0].nbytes
    first, last = -(-3 * page_bytes // mmap.PAGESIZE), 31 * page_bytes // mmap.PAGESIZE  # the system's pages in between
    given_back = storage.keys[0].view(-1).view(torch.uint8)[first * mmap.PAGESIZE : last * mmap.PAGESIZE]
    assert len(given_back) > 0
    assert not bool(given_back.any())
    assert bool(storage.keys[0][1:3].all())
    target = units.take(Precision.INT4)
    assert target is not None
    assert storage.seal(np.arange(1, EACH + 1, dtype=np.int32), target)
    assert bool(storage.arenas[Precision.INT4].bytes[0].any())
    storage.zero(target[:1])
    left = storage.arenas[Precision.INT4].groups[0].value.codes[0]
    assert not bool(left[:, :SIZE].any())
    assert bool(left[:, SIZE:].any())
    storage.freed(target)
    assert not bool(storage.arenas[Precision.INT4].bytes[0].any())
