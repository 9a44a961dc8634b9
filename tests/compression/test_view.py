"""What is sent of a path: folded turns, segments in their places, markers where parts were cut out."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.conversation import Item, Turn
from compression.segments import ENDING, HEADING, READ, Segment
from compression.view import Cut, Elision, Part, View, fold, held, layout, orphans, shown, units
from tests.compression.talks import assistant, call, exchange, output, reasoning, user

NONE: frozenset[str] = frozenset()


def segment(id: str, *turn_ids: str, text: str = "") -> Segment:
    return Segment(id, turn_ids, text or f"about {' '.join(turn_ids)}", 3, "model")


def turns(first: int, last: int) -> list[Turn]:
    return [exchange(f"t{at}", 1, 1) for at in range(first, last + 1)]


def said(items: tuple[Item, ...]) -> list[tuple[str | None, str]]:
    return [(item.role, item.text.strip()) for item in items]


PATH = [f"t{at}" for at in range(1, 10)]
S1, S2 = segment("s1", "t2", "t3", "t4"), segment("s2", "t6")


def test_a_segment_stands_where_its_first_turn_stood() -> None:
    assert layout(PATH, (S1, S2), frozenset({"t5"})) == ["t1", S1, "t5", S2, "t7", "t8", "t9"]
    assert layout(PATH, (S2, S1), NONE) == ["t1", S1, "t5", S2, "t7", "t8", "t9"]


def test_a_turn_pinned_in_a_segment_stands_raw_beside_it() -> None:
    assert layout(PATH[:5], (S1,), frozenset({"t2"})) == ["t1", "t2", S1, "t5"]
    assert layout(PATH[:5], (S1,), frozenset({"t3"})) == ["t1", S1, "t3", "t5"]
    assert layout(PATH[:5], (S1,), frozenset({"t2", "t3", "t4"})) == PATH[:5]


def test_a_segment_of_turns_elsewhere_is_not_shown() -> None:
    assert layout(PATH[:3], (S1,), NONE) == PATH[:3], "the path leaves amid the segment"
    assert layout(PATH, (segment("s", "x", "y"),), NONE) == PATH
    assert layout(PATH, (segment("s"),), NONE) == PATH
    assert layout([], (S1,), frozenset({"t9"})) == []


def test_segments_of_one_id_are_all_shown() -> None:
    same = replace(S2, id="s1")
    assert layout(PATH, (S1, same), NONE) == ["t1", S1, "t5", same, "t7", "t8", "t9"]


@given(
    st.lists(st.sampled_from(PATH), unique=True),
    st.lists(st.lists(st.sampled_from([*PATH, "x"]), max_size=4).map(tuple), max_size=4),
    st.frozensets(st.sampled_from([*PATH, "y"])),
)
def test_any_segments_lay_out_a_path_without_losing_a_turn(
    path: list[str], told: list[tuple[str, ...]], pinned: frozenset[str]
) -> None:
    entries = layout(path, [segment(f"s{at}", *ids) for at, ids in enumerate(told)], pinned)
    raw = [entry for entry in entries if isinstance(entry, str)]
    covered = {id for entry in entries if isinstance(entry, Segment) for id in entry.turn_ids}
    assert set(raw) | covered == set(path)
    assert raw == [id for id in path if id in set(raw)]
    assert pinned & set(path) <= set(raw)


def test_calls_and_their_outputs_are_one_unit() -> None:
    assert units(["a", "b", "c", "d"], {"b", "c"}) == [("a",), ("b", "c", "d")]
    assert units(["a", "b"], {"b"}) == [("a",), ("b",)]
    assert held(["a", "b", "c", "d"], frozenset({"d"}), {"b", "c"}) == {"b", "c", "d"}
    assert held(["a", "b"], NONE, {"a"}) == NONE


def test_a_pinned_output_stands_with_its_call() -> None:
    asked = Turn("t2", None, 0, "completed", (user(1, "u"),), (call("c"),))
    answered = Turn("t3", None, 0, "completed", (output("c", 5),), (assistant(1, "a"),))
    path = [*turns(1, 1), asked, answered, *turns(4, 6)]
    view = View("v", (segment("s", "t2", "t3", "t4"),))
    pinned = frozenset({"t3"})
    assert shown(path, view, pinned) == ["t1", "t2", "t3", view.segments[0], "t5", "t6"]
    folded = fold(path, view, pinned=pinned)
    assert orphans(folded.items) == []
    assert list(folded.items[2:6]) == [*asked.items, *answered.items]


def test_nothing_is_changed_where_there_is_nothing_to_show() -> None:
    path = [*turns(1, 2), Turn("t3", None, 0, "completed", (user(4, "u", 7),), (reasoning(3, "r"), call("c")))]
    folded = fold(path, View())
    assert list(folded.items) == [item for turn in path for item in turn.items]
    assert folded.system == ""
    assert list(fold([], View()).items) == []


def test_segments_in_a_row_are_one_exchange() -> None:
    view = View("v", (segment("s1", "t2", text="first"), segment("s2", "t3", text="second")))
    folded = fold(turns(1, 4), view)
    assert said(folded.items) == [
        ("user", "~1#t1u"),
        ("assistant", "~1#t1a"),
        ("user", f"{HEADING}\nfirst\nsecond\n{ENDING}"),
        ("assistant", READ),
        ("user", "~1#t4u"),
        ("assistant", "~1#t4a"),
    ]


def test_a_summary_may_stand_in_front_of_the_next_user_message() -> None:
    view = View("v", (segment("s1", "t2"), segment("s2", "t4")))
    folded = fold(turns(1, 5), view, placement="in_user")
    assert [item.role for item in folded.items] == ["user", "assistant"] * 3
    assert folded.items[2].text.startswith(f"{HEADING}\nabout t2\n{ENDING}\n\n~1#t3u")
    assert folded.items[4].text.startswith(f"{HEADING}\nabout t4\n{ENDING}\n\n~1#t5u")


def test_a_summary_in_front_of_a_message_of_parts_is_a_part() -> None:
    pictured = Turn("t2", None, 0, "completed", (user(4, "u", 7),), (assistant(1, "a"),))
    folded = fold([*turns(1, 1), pictured], View("v", (segment("s", "t1"),)), placement="in_user")
    first, *rest = folded.items[0].payload["content"]
    assert first == {"type": "input_text", "text": f"{HEADING}\nabout t1\n{ENDING}\n\n"}
    assert rest == list(pictured.input[0].payload["content"])


def test_a_summary_that_no_message_follows_is_an_exchange() -> None:
    folded = fold(turns(1, 2), View("v", (segment("s", "t2"),)), placement="in_user")
    assert said(folded.items)[2:] == [("user", f"{HEADING}\nabout t2\n{ENDING}"), ("assistant", READ)]


def test_summaries_may_end_the_system_prompt() -> None:
    view = View("v", (segment("s1", "t1"), segment("s2", "t3")))
    folded = fold(turns(1, 4), view, placement="in_system")
    assert folded.system == f"{HEADING}\nabout t1\n{ENDING}\n\n{HEADING}\nabout t3\n{ENDING}"
    assert [item.text.strip() for item in folded.items] == ["~1#t2u", "~1#t2a", "~1#t4u", "~1#t4a"]


CALLING = Turn(
    "t2", None, 0, "completed", (output("c0", 900, 7), user(50, "u", 7, 8)), (reasoning(30, "r"), assistant(900, "a"))
)


def cut(part: Part, index: int, kind: Cut, text: str = "[cut]") -> Elision:
    return Elision("t2", part, index, kind, text, 1)


@pytest.mark.parametrize(
    ("elision", "at", "left"),
    [
        (cut("input", 0, "tool_output"), 0, "[cut]"),
        (cut("input", 0, "image"), 0, "~900#c0o [cut]"),
        (cut("input", 1, "image"), 1, "~50#u [cut]"),
        (cut("output", 1, "oversized"), 3, "[cut]"),
    ],
)
def test_a_marker_stands_where_a_part_was(elision: Elision, at: int, left: str) -> None:
    items = fold([CALLING, *turns(3, 3)], View("v", (), (elision,))).items
    raw = fold([CALLING, *turns(3, 3)], View()).items
    assert items[at].text == left
    assert items[at].payload.keys() == raw[at].payload.keys()
    assert [item for n, item in enumerate(items) if n != at] == [item for n, item in enumerate(raw) if n != at]


def test_cut_reasoning_leaves_nothing() -> None:
    items = fold([CALLING, *turns(3, 3)], View("v", (), (cut("output", 0, "reasoning", ""),))).items
    assert items == tuple(item for turn in (CALLING, *turns(3, 3)) for item in turn.items if item.type != "reasoning")


def test_what_was_cut_of_a_turn_that_is_pinned_since_stands_again() -> None:
    view = View("v", (), (cut("input", 0, "tool_output"),))
    assert fold([CALLING], view, pinned=frozenset({"t2"})).items == tuple(CALLING.items)


def test_reasoning_is_stripped_of_old_turns_that_nobody_pinned() -> None:
    path = [Turn(f"t{at}", None, 0, "completed", (), (reasoning(3, f"r{at}"),)) for at in (1, 2, 3)]
    folded = fold(path, View(), pinned=frozenset({"t2"}), reasoning="strip")
    assert [item.text.strip() for item in folded.items] == ["~3#r2", "~3#r3"]
    assert fold(path, View(), reasoning="keep") == fold(path, View(), reasoning="template") == fold(path, View())


def test_orphans_are_outputs_before_or_without_their_call() -> None:
    assert orphans([call("a"), call("b"), output("b", 1), output("a", 1)]) == []
    assert orphans([output("a", 1), call("a")]) == ["a"]
    assert orphans([call("a"), output("b", 1)]) == ["b"]


ELISIONS = st.builds(
    Elision,
    turn_id=st.text(),
    part=st.sampled_from(get_args(Part)),
    index=st.integers(0, 99),
    kind=st.sampled_from(get_args(Cut)),
    text=st.text(),
    tokens_removed=st.integers(0, 10**6),
)
WORDS = st.lists(st.text(), max_size=3).map(tuple)
SEGMENTS = st.builds(
    Segment,
    id=st.text(),
    turn_ids=WORDS,
    text=st.text(),
    tokens=st.integers(0, 10**6),
    source=st.sampled_from(("model", "repaired", "extracted", "masked", "dropped")),
    rank=st.integers(0, 9),
    source_tokens=st.integers(0, 10**6),
    source_hash=st.text(),
    facts=WORDS,
    merged=WORDS,
)


@given(st.lists(SEGMENTS, max_size=3).map(tuple), st.lists(ELISIONS, max_size=3).map(tuple))
def test_a_view_comes_back_from_json_as_it_was(segments: tuple[Segment, ...], elisions: tuple[Elision, ...]) -> None:
    view = View("v", segments, elisions)
    assert View.of_json("v", orjson.loads(orjson.dumps(view.as_json()))) == view
    assert View.of_json("v", {}) == View("v")
