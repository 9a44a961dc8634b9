"""Conversations with planted facts come out alike from a seed, and the scores tell what a text still says."""

from __future__ import annotations

import pytest

from bench.compaction.bank import Topic
from bench.compaction.generate import Conversation, Fact, generate
from bench.compaction.held_out import HELD_RULED, HELD_UNRULED
from bench.compaction.ruled import RULED
from bench.compaction.score import Kept, normalised
from bench.compaction.unruled import UNRULED


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    return generate(7, turns=120)


def everything(conversation: Conversation, *, but: int | None = None) -> str:
    return "\n".join(item.text for at, turn in enumerate(conversation.turns) if at != but for item in turn.items)


def fact(value: str, *, kind: str = "id", old: str | None = None, keys: tuple[str, ...] = ("ferry",)) -> Fact:
    return Fact("f", kind, True, 0, "user", "", value, keys, (), "", old)


def test_a_seed_gives_one_conversation_and_another_seed_another(conversation: Conversation) -> None:
    assert generate(7, turns=120) == conversation
    assert generate(8, turns=120) != conversation


def test_every_kind_is_planted_and_told_apart_by_whether_a_rule_exists_for_it(conversation: Conversation) -> None:
    assert {fact.kind for fact in conversation.facts} == {*RULED, *UNRULED}
    assert {fact.ruled for fact in conversation.facts if fact.kind in UNRULED} == {False}


def test_every_fact_stands_in_its_turn_with_its_subject_and_nowhere_else(conversation: Conversation) -> None:
    for fact in conversation.facts:
        told = Kept("\n".join(item.text for item in conversation.turns[fact.turn].items))
        assert told.connected(fact), fact
        assert not Kept(everything(conversation, but=fact.turn)).survives(fact), fact


def test_the_whole_conversation_answers_everything_right(conversation: Conversation) -> None:
    kept = Kept(everything(conversation))
    twice = [fact for fact in conversation.facts if fact.old is not None]
    assert twice
    assert {kept.superseded(fact) for fact in twice} == {"right"}


def test_choices_are_three_other_values(conversation: Conversation) -> None:
    assert all(len({*fact.choices, fact.value}) == 4 for fact in conversation.facts)


def test_tool_calls_are_answered_in_the_next_turn(conversation: Conversation) -> None:
    called = 0
    for turn, following in zip(conversation.turns, conversation.turns[1:], strict=False):
        for item in turn.output:
            if item.type == "function_call":
                called += 1
                assert following.input[0].payload["call_id"] == item.payload["call_id"]
    assert called >= 5


EVERY = [
    pytest.param(kind, topic, id=topic.ask)
    for kinds in (RULED, UNRULED, HELD_RULED, HELD_UNRULED)
    for kind, topics in kinds.items()
    for topic in topics
    if topic.by != "tool"  # a tool's field is the statement
]


@pytest.mark.parametrize(("kind", "topic"), EVERY)
def test_every_way_to_say_a_thing_connects_value_and_subject(kind: str, topic: Topic) -> None:
    value = "QX-4411" if callable(topic.values) else topic.values[0]
    for say in topic.say:
        assert Kept(say.format(v=value, old="before")).connected(fact(value, kind=kind, keys=topic.keys)), say
    for say in topic.first:
        assert Kept(say.format(v=value)).connected(fact(value, kind=kind, keys=topic.keys)), say


@pytest.mark.parametrize(
    ("text", "value", "kind", "survives"),
    [
        ("ferry booking: QX-4411.", "QX-4411", "id", True),
        ("FERRY **qx-4411**", "QX-4411", "id", True),
        ("ferry QX-44112", "QX-4411", "id", False),
        ("The deposit was 1 840 euros", "1,840", "number", False),
        ("The deposit was 1840 euros", "1,840", "number", True),
        ("{\"log\": \"C:\\\\Data\\\\a.xlsx\"}", "C:\\Data\\a.xlsx", "path", True),
        ("旅館の予約番号はヤ4471でした。", "ヤ4471", "cjk", True),
        ("The van is small since the lanes are narrow, too", "the lane is too narrow", "cause", True),
        ("The van is small. A lane may be narrow, too", "the lane is too narrow", "cause", True),
        ("The lane. It is too narrow.", "the lane is too narrow", "cause", False),
    ],
)  # fmt: skip
def test_what_survives(text: str, value: str, kind: str, survives: bool) -> None:
    assert Kept(text).survives(fact(value, kind=kind)) is survives


def test_a_value_apart_from_its_subject_survives_unconnected() -> None:
    assert not Kept("Ferry. QX-4411.").connected(fact("QX-4411"))
    assert Kept("The ferry: QX-4411.").connected(fact("QX-4411"))


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("The meeting is at 9:40.", "right"),
        ("The meeting is at 8:05.", "stale"),
        ("The meeting is at 8:05. The meeting is at 9:40 now.", "right"),
        ("The meeting is at 8:05. The meeting is at 9:40.", "unmarked"),
        ("There is a meeting.", "gone"),
    ],
)
def test_a_superseded_value_is_right_stale_unmarked_or_gone(text: str, verdict: str) -> None:
    assert Kept(text).superseded(fact("9:40", kind="superseded", old="8:05")) == verdict


def test_one_spelling_for_what_reads_the_same() -> None:
    assert normalised("“ＱＸ” 12,400\u00a0‘a’") == "\"qx\" 12400 'a'"
