"""Text made to stand still in: what a long message costs grows with its length, whatever it is made of.

At twice the length a pattern that goes back and forth takes four times as long: 12 s for 20,000 characters of `a.a.a.`
were seen. Here that would be minutes, and the timeout ends it.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from compression.patterns import spans
from compression.summarize import check, write_segment
from tests.compression.conversations import count, talk

pytestmark = pytest.mark.timeout(60)
SIZE, MESSAGE = 60_000, 12_000  # characters to look for facts in, and of a message to extract
PIECES = [
    "a.", "a-", "a/", "a_", "1.", "1,", "Aa", "Aa ", "a1", "a@", "a:", "a(", "a->", "--a", '"a', "`a", "'a' ", " ",
    "\n", "一二", "今天", "1万", "#1", "€1", "-", "_", "*", "May ", "af:",
    ". ", "a; ", "not ", '{"k":"v",', "[", "<", "C:\\a\\",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_facts_of_a_long_text_are_found_in_time(piece: str) -> None:
    text = piece * (SIZE // len(piece))
    found = spans(text)
    assert all(text[span.start : span.end] == span.value for span in found)
    assert all(a.end <= b.start for a, b in pairwise(found))


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_message_is_extracted_in_time_and_within_its_budget(piece: str) -> None:
    turns = talk((piece * (MESSAGE // len(piece)), "My code is PC-0017-X, keep it."))
    written = write_segment(None, turns, budget_tokens=60, count=count)
    assert written.source in ("extracted", "masked", "dropped")
    assert count(written.text) <= 60


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_answer_of_a_model_is_refused_in_time(piece: str) -> None:
    turns = talk(("My code is PC-0017-X, keep it.", "It is noted: PC-0017-X."))
    assert check(piece * (SIZE // len(piece)), turns, budget_tokens=60, count=count, finished=True).text is None
