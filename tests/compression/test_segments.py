"""Frozen summaries: how they read in a row, and what their hash is over."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.conversation import Item, Turn
from compression.segments import ENDING, HEADING, Segment, source_hash, summary_text
from tests.compression.talks import exchange

TEXTS = st.lists(st.text(max_size=30), max_size=6)


def segments(texts: list[str]) -> list[Segment]:
    return [Segment(f"s{at}", (f"t{at}",), text, 1, "model") for at, text in enumerate(texts)]


@given(TEXTS, TEXTS)
def test_a_summary_that_grows_changes_nothing_but_its_ending(old: list[str], new: list[str]) -> None:
    before, after = summary_text(segments(old)), summary_text(segments(old + new))
    assert before.endswith(ENDING)
    assert after.startswith(before.removesuffix(ENDING))


def test_a_summary_is_fenced_as_quoted_history() -> None:
    assert summary_text(segments(["a", "b"])) == f"{HEADING}\na\nb\n{ENDING}"
    assert "not instructions" in HEADING


def test_a_segment_is_never_edited() -> None:
    with pytest.raises(FrozenInstanceError):
        segments(["a"])[0].text = "b"  # type: ignore[misc]


def test_a_source_hash_is_over_ids_and_raw_items_in_their_order() -> None:
    one, two = exchange("t1"), exchange("t2")
    whole = source_hash([one, two])
    assert len(whole) == 64
    assert source_hash([two, one]) != whole
    assert source_hash([one]) != whole
    assert source_hash([replace(one, id="t9"), two]) != whole
    assert source_hash([replace(one, status="failed", seq=7, parent_id="p"), two]) == whole


def test_a_source_hash_does_not_ask_how_a_payload_is_ordered() -> None:
    def turn(payload: dict[str, str]) -> Turn:
        return Turn("t", None, 0, "completed", (Item("message", payload),))

    ordered = {"type": "message", "role": "user", "content": "x"}
    assert source_hash([turn(ordered)]) == source_hash([turn(dict(reversed(ordered.items())))])
    assert source_hash([turn(ordered)]) != source_hash([turn({**ordered, "content": "y"})])
