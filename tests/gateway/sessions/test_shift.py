"""Kept turns are found in the new prompt by their ids; a shift is asked for only where it moves something."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from engines.contract import Base, Shift
from gateway.sessions.shift import ANCHOR, LEAST, common_end, shift_after_cut

BASE = Base(1000, b"d" * 32)
IDS = st.lists(st.integers(0, 50_000), max_size=60)


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def test_kept_turns_behind_a_summary_are_found_with_both_places() -> None:
    first, gone, kept = list(range(100)), list(range(1000, 1700)), list(range(2000, 2200))
    prompt = [*first, *range(5000, 5040), *kept, *range(7000, 7030)]
    found = shift_after_cut(packed([*first, *gone, *kept]), packed(prompt), BASE)
    assert found == Shift(BASE, source_start=800, dest_start=140, length=200)


def test_what_has_not_moved_or_is_short_is_not_shifted() -> None:
    kept = list(range(2000, 2200))
    assert shift_after_cut(packed(kept), packed([*kept, 1, 2, 3]), BASE) is None
    short = kept[: LEAST - 1]
    assert shift_after_cut(packed([1, *short]), packed([9, 9, *short]), BASE) is None
    assert shift_after_cut(packed(kept[: ANCHOR - 1]), packed(kept), BASE) is None


def test_bytes_that_match_between_two_ids_are_no_match() -> None:
    kept = [0x01010101] * 200
    found = shift_after_cut(packed([5, *kept]), packed([6, 7, *kept, 8]), BASE)
    assert found == Shift(BASE, source_start=1, dest_start=2, length=200)


@given(IDS, IDS, IDS)
def test_the_common_end_is_the_longest(one: list[int], other: list[int], end: list[int]) -> None:
    a, b = [*one, *end], [*other, *end]
    expected = 0
    while expected < min(len(a), len(b)) and a[-1 - expected] == b[-1 - expected]:
        expected += 1
    assert common_end(packed(a), packed(b)) == expected
