"""Where the kernels are sent: tiles of a table with several precisions, and blocks of queries."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.local.kernels.tiles import lay_blocks, lay_tiles
from engines.local.kv.precision import SEALED, Precision
from engines.local.kv.quant import UNIT
from engines.local.kv.units import Units

TILE = {Precision.INT8: 64, Precision.K8V4: 64, Precision.INT4: 32}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([8, 16, 32, 64]))
def test_every_token_of_every_row_is_in_one_tile_at_its_place(data: st.DataObject, size: int) -> None:
    each = UNIT // size
    units = Units(64, each, 1000, dict.fromkeys(SEALED, 400))
    tables, lengths = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        table: list[int] = []
        for precision in data.draw(st.lists(st.sampled_from([Precision.FULL, *SEALED]), min_size=1, max_size=5)):
            if precision == Precision.FULL:
                table += data.draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))
                continue
            taken = units.take(precision)
            assert taken is not None
            start = data.draw(st.integers(0, each - 1))
            table += taken[start : data.draw(st.integers(start + 1, each))].tolist()
        tables.append(np.array(table, np.int64))
        lengths.append(len(table) * size - data.draw(st.integers(0, size - 1)))
    seen: dict[tuple[int, int], tuple[int, int]] = {}  # row, position -> page, token of the page
    for precision, laid in lay_tiles(tables, lengths, size, units, TILE).items():
        for row in range(len(tables)):
            for place, base, low, high in laid.tiles[laid.offsets[row] : laid.offsets[row + 1]].tolist():
                for position in range(low, high):
                    inner = position - base
                    if precision == Precision.FULL:
                        page = place
                    else:
                        tile = TILE[precision]
                        unit, sub = divmod(place, UNIT // tile)
                        assert 0 <= inner < tile
                        block, inner = divmod(sub * tile + inner, size)
                        page = units.first[precision] + unit * each + block
                    assert (row, position) not in seen
                    seen[row, position] = (page, inner)
    wanted = {
        (row, position): (int(table[position // size]), position % size)
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True))
        for position in range(length)
    }
    assert seen == wanted


def test_blocks_share_the_tokens_of_a_row_and_never_hold_two_rows() -> None:
    blocks = lay_blocks([(0, 0, 1, 9), (1, 1, 50, 100)], 21)
    assert blocks.tolist() == [[0, 0, 1, 9], [1, 1, 21, 100], [1, 22, 21, 121], [1, 43, 8, 142]]
