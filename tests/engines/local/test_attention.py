"""The ways to read paged K/V, and to multiply few rows, give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from engines.local.attention import DecodeSpans, DecodeTables, Scores, _decode
from engines.local.kv.shapes import LayerShape
from engines.local.kv.storage import KVStorage
from engines.local.linear import FEWEST, MOST, FewRowsLinear, favour_few_rows

HEADS, KV_HEADS, DIM, SIZE = 6, 2, 16, 8
TABLES = ([3, 4, 5], [9, 2], [7])  # a run, no run, a single page
LENGTHS = (20, 13, 8)


def storage() -> KVStorage:
    made = KVStorage(
        {0: LayerShape(KV_HEADS, DIM, DIM)}, 12, SIZE, dtype=torch.float32, device=torch.device("cpu"), nan_fill=False
    )
    draw = torch.Generator().manual_seed(1)
    for pages in (made.keys[0], made.values[0]):
        pages[1:] = torch.randn(pages[1:].shape, generator=draw)
    return made


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_decode_row_by_row_is_decode_over_padded_tables(window: int | None, softcap: float | None) -> None:
    pool = storage()
    spans = tuple(pool.span(np.array(t, np.int64), n) for t, n in zip(TABLES, LENGTHS, strict=True))
    assert [span.slot for span in spans] == [3 * SIZE, None, 7 * SIZE]
    padded = torch.tensor([row + [0] * (3 - len(row)) for row in TABLES]).ravel()
    tables = DecodeTables(3, padded, torch.tensor(LENGTHS), max(LENGTHS), False)
    query = torch.randn(HEADS, 3, DIM, generator=torch.Generator().manual_seed(2))
    scores = Scores(DIM**-0.5, window, softcap, None)
    one = _decode(pool, 0, DecodeSpans(spans), query, scores)
    other = _decode(pool, 0, tables, query, scores)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_run_of_pages_is_read_where_it_lies() -> None:
    pool = storage()
    keys, _ = pool.read(0, pool.span(np.array([3, 4, 5], np.int64), 20))
    assert keys.untyped_storage().data_ptr() == pool.keys[0].untyped_storage().data_ptr()
    copied, _ = pool.read(0, pool.span(np.array([3, 5, 4], np.int64), 20))
    assert torch.equal(keys[:, :, :SIZE], copied[:, :, :SIZE])
    assert not torch.equal(keys, copied)


@pytest.mark.parametrize("rows", [1, FEWEST, 5, MOST, MOST + 1])
@pytest.mark.parametrize("bias", [True, False])
def test_few_rows_give_what_linear_gives(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 160, bias=bias))
    given = torch.randn(1, rows, 96)
    with torch.inference_mode():
        expected = model(given)
        assert favour_few_rows(model) == 1
        assert type(model[0]) is FewRowsLinear
        torch.testing.assert_close(model(given), expected, rtol=0, atol=1e-5)
