"""The attention kernels, in Triton's interpreter where there is no GPU, against the torch reference."""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.local.kv.shapes import LayerShape
from engines.local.partial import Scores

pytest.importorskip("triton")

from bench.gpu_pages import Pages, by_kernels, by_reference, make_pages

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
HEADS, SIZE = 4, 64  # the interpreter takes 30 ms a tile: few and large ones
SHAPES = {
    0: LayerShape(2, 64, 64),
    1: LayerShape(1, 96, 96),  # channels that are no power of two: values lie as they are, in groups of 32
    2: LayerShape(4, 16, 128),  # no groups; values wider than keys
}
TOLERANCE = 3e-6  # float32 sums in another order, of up to 400 values about 1
CASES = [
    Scores(0.125, None, None, None),
    Scores(0.125, 70, 5.0, torch.randn(HEADS, generator=torch.Generator().manual_seed(6)).to(DEVICE)),
]


@cache
def _pages() -> tuple[Pages, list[np.ndarray]]:
    pages = make_pages(SHAPES, pages=28, size=SIZE, dtype=torch.float32, device=DEVICE)
    return pages, [pages.mixed(1), pages.mixed(8, torn=True), np.array([28, 26, 27])]


def _same(layer: int, rows: list[tuple[np.ndarray, int, int]], scores: Scores) -> None:
    pages, _ = _pages()
    query = torch.randn(HEADS, sum(row[1] for row in rows), SHAPES[layer].key_dim, generator=torch.Generator())
    query = query.to(DEVICE)
    got, wanted = (attend(pages, layer, rows, query, scores) for attend in (by_kernels, by_reference))
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("layer", "case"), [(0, CASES[1]), (1, CASES[0])])
def test_rows_of_mixed_precision_are_as_the_reference_has_them(layer: int, case: Scores) -> None:
    _, (mixed, torn, full) = _pages()
    _same(layer, [(mixed, 1, 380), (full, 1, 33), (torn, 30, 350)], case)


def test_values_may_be_wider_than_keys_and_heads_may_share_nothing() -> None:
    _, (_, _, full) = _pages()
    _same(2, [(full[:1], 1, 33), (full[:1], 5, 5)], CASES[0])


@pytest.mark.prove
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_length_and_window(data: st.DataObject) -> None:
    _, tables = _pages()
    rows = []
    for tokens in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=2).map(sorted)):
        table = tables[data.draw(st.integers(0, 2))]
        length = data.draw(st.integers(tokens, len(table) * SIZE))
        rows.append((table[: -(-length // SIZE)], tokens, length))
    window = data.draw(st.sampled_from([None, 1, 31, 64, 200]))
    _same(data.draw(st.sampled_from([0, 1])), rows, Scores(0.2, window, None, None))


def test_half_precision_is_as_near_as_its_products_are() -> None:
    pages = make_pages({0: LayerShape(1, 64, 64)}, pages=6, size=SIZE, dtype=torch.float16, device=DEVICE)
    rows = [(pages.mixed(1), 1, 380)]
    query = torch.randn(HEADS, 1, 64, generator=torch.Generator()).to(DEVICE, torch.float16)
    got, wanted = (attend(pages, 0, rows, query, CASES[0]) for attend in (by_kernels, by_reference))
    torch.testing.assert_close(got, wanted, rtol=0, atol=4e-3)  # fp16 has 11 bits: weights, values and results of 1


def test_what_becomes_of_a_row_does_not_depend_on_its_batch_mates() -> None:
    pages, (_, torn, full) = _pages()
    query = torch.randn(HEADS, 2, 64, generator=torch.Generator()).to(DEVICE)
    rows = [(torn, 1, 350), (full, 1, 33)]
    together = by_kernels(pages, 0, rows, query, CASES[0])
    for at, row in enumerate(rows):
        assert torch.equal(by_kernels(pages, 0, [row], query[:, at : at + 1], CASES[0])[0], together[at])
