"""Text made to stand still in: what a long message costs grows with its length, whatever it is made of.

At twice the length a pattern that goes back and forth takes four times as long: 12 s for 20,000 characters of `a.a.a.`
were seen. Here that would be minutes, and the timeout ends it.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from compression.conversation import Turn
from compression.patterns import spans
from compression.summarize import check, write_segment
from compression.words import normalise
from tests.compression.conversations import called, count, message, talk

pytestmark = pytest.mark.timeout(60)
SIZE, MESSAGE = 60_000, 12_000  # characters to look for facts in, and of a message to extract
PIECES = [
    "a.", "a-", "a/", "a_", "1.", "1,", "Aa", "Aa ", "a1", "a@", "a:", "a(", "a->", "--a", '"a', "`a", "'a' ", " ",
    "\n", "一二", "今天", "1万", "#1", "€1", "-", "_", "*", "May ", "af:", "7",
    ". ", "a; ", "not ", '{"k":"v",', "[", "<", "C:\\a\\", "the 1 turns ", "九",
]  # fmt: skip
ANSWERS = [
    *PIECES, "<think>", "</think>", "<think></analysis>", "let me know ", "feel free. ", "user ", "user:\n", "\n\t",
    "#", "<|a", "<|a|>", "===== quoted conversation 1 =====\n", "the 1 turns from ",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_facts_of_a_long_text_are_found_in_time(piece: str) -> None:
    text = piece * (SIZE // len(piece))
    found = spans(text)
    assert all(text[span.start : span.end] == span.value for span in found)
    assert all(a.end <= b.start for a, b in pairwise(found))


@pytest.mark.parametrize("piece", [*PIECES, "7万", "7.7", "二"])
def test_values_of_any_length_are_compared_in_time(piece: str) -> None:
    assert normalise(piece * (SIZE // len(piece))) is not None


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_message_is_extracted_in_time_and_within_its_budget(piece: str) -> None:
    turns = talk((piece * (MESSAGE // len(piece)), "My code is PC-0017-X, keep it."))
    written = write_segment(None, turns, budget_tokens=60, count=count)
    assert written.source in ("extracted", "masked", "dropped")
    assert count(written.text) <= 60


@pytest.mark.parametrize("budget", [60, 2000])
@pytest.mark.parametrize("piece", ANSWERS)
def test_a_long_answer_of_a_model_is_refused_or_cut_in_time(piece: str, budget: int) -> None:
    """A budget of 2,000 tokens lets so long an answer come as far as the last look."""
    turns = talk(("My code is PC-0017-X, keep it.", "It is noted: PC-0017-X."))
    answer = f"The code is\n{piece * (SIZE // len(piece))}\nand it is kept"
    checked = check(answer, turns, budget_tokens=budget, count=count, finished=True)
    assert count(checked.text or "") <= min(budget, 20), checked
    assert checked.problems


def test_a_text_with_a_number_that_no_float_holds_is_summarised() -> None:
    turns = talk(("My code is PC-0017-X, keep it. It cost " + "九" * 400 + "亿, or 1" + "0" * 400 + "万.", "Noted."))
    written = write_segment(None, turns, budget_tokens=100, count=count)
    assert "PC-0017-X" in written.text


@pytest.mark.parametrize(
    "json",
    [
        '{"note": "cut in an emoji \\ud83d", "id": "PC-0017-X"}',
        '{"\\ud800": "PC-0017-X"}',
        '"PC-0017-X \\udfff"',
        '{"id": "PC-0017-X", "n": ' + "9" * 5000 + "}",
        '{"id": "PC-0017-X", "n": NaN}',
        '{"id": "PC-0017-X", "deep": ' + "[" * 20_000 + "]" * 20_000 + "}",
    ],
    ids=["half a pair", "in a key", "alone", "long number", "no number", "deep"],
)
def test_json_of_a_tool_that_no_text_may_hold_is_summarised(json: str) -> None:
    for arguments, output in ((json, "done"), ("{}", json)):
        items = (message("user", "Look it up, my code is PC-0017-X."), *called("look_up", arguments, output))
        written = write_segment(None, [Turn("t0", None, 0, "completed", items)], budget_tokens=80, count=count)
        assert "PC-0017-X" in written.text.encode().decode()
