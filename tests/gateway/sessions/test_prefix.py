"""The prefix report."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.prefix import prefix_report, shared_tokens
from gateway.sessions.vocabulary import pack_ids, unpack_ids

IDS = st.lists(st.integers(0, 3), max_size=40)


def names(ids: bytes) -> str:
    return " ".join(map(str, unpack_ids(ids)))


@given(IDS, IDS)
def test_the_shared_prefix_is_what_a_walk_would_find(one: list[int], other: list[int]) -> None:
    walked = 0
    while walked < min(len(one), len(other)) and one[walked] == other[walked]:
        walked += 1
    assert shared_tokens(pack_ids(one), pack_ids(other)) == walked


def test_a_longer_prompt_that_keeps_the_path_has_no_cause() -> None:
    report = prefix_report(pack_ids([1, 2]), pack_ids([1, 2, 3]), decode=names, hints=["tools_changed"])
    assert (report.previous_tokens, report.reused_tokens) == (2, 2)
    assert (report.first_difference, report.cause) == (None, None)


def test_the_first_difference_is_shown_with_both_texts() -> None:
    report = prefix_report(pack_ids([1, 2, 3]), pack_ids([1, 7, 3, 4]), decode=names)
    assert (report.reused_tokens, report.first_difference) == (1, 1)
    assert (report.before_text, report.after_text) == ("2 3", "7 3 4")
    assert report.cause == "template_rewrites_history"


def test_of_several_causes_the_most_far_reaching_is_named() -> None:
    report = prefix_report(pack_ids([1]), pack_ids([2]), decode=names, hints=["edited", "model_changed"])
    assert report.cause == "model_changed"


def test_a_path_that_was_cut_short_differs_where_it_was_cut() -> None:
    assert prefix_report(pack_ids([1, 2, 3]), pack_ids([1, 2]), decode=names).first_difference == 2
