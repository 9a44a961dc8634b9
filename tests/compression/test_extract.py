"""Extraction keeps what tells most, under the budget, whatever the text and whatever counts it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression.conversation import Item, Turn
from compression.extract import elide, extract, mask, merge
from tests.compression.conversations import called, count, message, talk, turn

COUNTERS: dict[str, Callable[[str], int]] = {
    "four characters": count,
    "characters": len,
    "bytes": lambda text: len(text.encode("utf-8", "surrogatepass")),
    "words": lambda text: len(text.split()),
}
ADVICE = (
    "That's a great question! There are several things to consider. You should always make sure to look for good "
    "options and try different approaches. It's important to keep an open mind. Let me know if you need anything else!"
)
items = st.one_of(
    st.builds(message, st.sampled_from(["user", "assistant", "system"]), st.text(max_size=300)),
    st.builds(
        Item,
        st.sampled_from(["function_call", "function_call_output", "reasoning", "message"]),
        st.dictionaries(
            st.sampled_from(["name", "arguments", "output", "content", "call_id", "role", "summary"]),
            st.one_of(
                st.text(max_size=80),
                st.integers(),
                st.none(),
                st.lists(st.dictionaries(st.text(max_size=4), st.text(max_size=9))),
            ),
        ),
    ),
)
turns_of_anything = st.lists(
    st.builds(
        lambda number, found: Turn(f"t{number}", None, number, "completed", tuple(found)),
        st.integers(),
        st.lists(items, max_size=4),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(turns_of_anything, st.integers(min_value=-3, max_value=200), st.sampled_from(sorted(COUNTERS)))
def test_the_budget_holds_for_any_turns_and_any_counter(turns: list[Turn], budget: int, counter: str) -> None:
    counted = COUNTERS[counter]
    found = extract(turns, budget_tokens=budget, count=counted)
    assert counted(found.text) <= max(0, budget)
    assert found == extract(turns, budget_tokens=budget, count=counted)
    assert counted(mask(turns, budget_tokens=budget, count=counted)) <= max(0, budget)
    assert counted(merge([found.text, "x is 3"], budget_tokens=budget, count=counted)) <= max(0, budget)


@settings(deadline=None)
@given(st.text(max_size=2000), st.integers(min_value=-3, max_value=300), st.sampled_from(sorted(COUNTERS)))
def test_an_elided_text_fits_and_a_short_one_is_untouched(text: str, budget: int, counter: str) -> None:
    counted = COUNTERS[counter]
    cut = elide(text, budget_tokens=budget, count=counted)
    assert counted(cut) <= max(0, budget)
    if counted(text) <= budget:
        assert cut == text


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("By the way, my order is ORD-48213. Thanks so much for your help!", "ORD-48213"),
        ("Just so you know, i can't stand mushrooms in anything. What should I cook tonight?", "can't stand mushrooms"),
        (
            "oh and my sister looks after the twins on fridays, so please keep that in mind",
            "my sister looks after the twins",
        ),
        ("We talked it over and decided against the loft conversion. Any tips?", "decided against the loft conversion"),
        (
            "the spare key is with the baker downstairs. Could you write me a limerick about bread?",
            "spare key is with the baker",
        ),
        ("Übrigens vertrage ich keine Nüsse. Was soll ich kochen?", "vertrage ich keine Nüsse"),
        ("Au fait, ma voisine garde le chat pendant les vacances. Que faire ?", "ma voisine garde le chat"),
        ("顺便说一下，我不吃香菜。今晚做什么菜好？", "我不吃香菜"),
        ("ちなみに、私は猫アレルギーです。何かおすすめはありますか？", "猫アレルギー"),
    ],
)
def test_what_a_user_says_outlives_an_assistants_advice(said: str, kept: str) -> None:
    turns = talk((said, ADVICE), ("And now something else?", ADVICE), ("Tell me more.", ADVICE))
    found = extract(turns, budget_tokens=40, count=count).text
    assert kept in found
    assert "great question" not in found
    assert "Thanks" not in found


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        ("The repo is in ~/work/exporter, never push to the release branch.", "never push to the release branch"),
        ("And don't touch the timeout, ops wants it at 30.", "don't touch the timeout, ops wants it at 30"),
        ("For the menu of the whole party, which I wrote down, nobody may order from KITCHEN-77.", "nobody may order"),
    ],
)
def test_what_is_denied_is_not_cut_from_what_is_kept(said: str, whole: str) -> None:
    turns = talk((said, ADVICE), ("My code is QX-4481, my other code is QX-4482.", ADVICE))
    assert whole in extract(turns, budget_tokens=44, count=count).text


def test_logs_keep_their_errors() -> None:
    log = "\n".join(f"2026-03-02 02:00:{n:02} INFO  step {n} of the nightly job is done" for n in range(40))
    log += "\n2026-03-02 02:00:41 ERROR pool exhausted after 30s (size=5)"
    turns = [turn(0, "Why does it fail?", ADVICE, *called("tail", {"file": "nightly.log"}, log))]
    assert "ERROR pool exhausted after 30s" in extract(turns, budget_tokens=40, count=count).text


def test_noise_of_an_answer_goes_before_its_content() -> None:
    answer = {"request": "KSS-93534", "checked_at": "2026-01-04T10:11:12Z", "took_ms": 41, "status": "held at customs"}
    turns = [turn(0, "Where is it?", "As you see.", *called("track", {"no": 7}, answer))]
    found = extract(turns, budget_tokens=12, count=count).text
    assert "status: held at customs" in found
    assert "KSS" not in found


def test_politeness_is_cut_from_what_is_kept() -> None:
    turns = talk(
        ("Hi there! By the way, I should mention that my flight is LH-442, please.", "Of course! Happy to help.")
    )
    assert extract(turns, budget_tokens=40, count=count).text == "User: my flight is LH-442"


def test_speakers_are_named_and_the_order_is_kept() -> None:
    turns = [
        turn(
            0,
            "My parcel is P-7781.",
            "I've booked courier C-902 for you.",
            *called("track", {"id": "P-7781"}, {"hub": "H-55"}),
        ),
        turn(1, "I want it before 9:30.", "Noted."),
    ]
    lines = extract(turns, budget_tokens=80, count=count).text.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["User", "Tool track", "Assistant", "User"]
    assert lines[-1] == "User: I want it before 9:30"


def test_the_changed_value_goes_before_the_newest() -> None:
    turns = talk(
        ("My budget for the kitchen is 4500 euros.", ADVICE),
        ("I like oak.", ADVICE),
        ("Actually my budget for the kitchen is now 6200 euros.", ADVICE),
    )
    found = extract(turns, budget_tokens=22, count=count).text
    assert "6200" in found
    assert "4500" not in found


def test_another_address_of_something_else_replaces_none() -> None:
    turns = talk(
        ("The wiki is at https://orchard.example.org/table/4635 by the way.", ADVICE),
        ("It rained the whole afternoon here. I have been turning this over in my head.", ADVICE),
        ("The server was moved to https://basin.example.net/digest/188.", ADVICE),
    )
    found = extract(turns, budget_tokens=40, count=count).text
    assert "https://orchard.example.org/table/4635" in found
    assert "https://basin.example.net/digest/188" in found


def test_kept_and_lost_are_the_ledger() -> None:
    turns = talk(("My codes are K-1001 and K-2002. I own 3 lamps and 4 rugs and 5 chairs, 6 tables.", ADVICE))
    found = extract(turns, budget_tokens=12, count=count)
    assert {fact.value for fact in found.kept} >= {"K-1001", "K-2002"}
    assert found.lost
    assert all(fact.value in found.text for fact in found.kept)
    assert not any(fact.value in found.text.split() for fact in found.lost)


def test_a_short_answer_keeps_its_question() -> None:
    turns = talk(("Plan a trip for me.", "Sure. Which city do you want to see?"), ("lisbon", "Nice choice!"))
    assert "Which city do you want to see - lisbon" in extract(turns, budget_tokens=60, count=count).text


def test_identifiers_survive_a_tight_budget() -> None:
    turns = [
        turn(
            number,
            f"Please look at case CASE-{number}A{number * 37 % 91}X, the customer called again, rather unhappy.",
            ADVICE * 3,
        )
        for number in range(40)
    ]
    found = extract(turns, budget_tokens=40 * 14, count=count)
    assert sum(fact.kind == "identifier" for fact in found.kept) >= 38


def test_merging_keeps_the_newest_value_and_says_nothing_twice() -> None:
    first = "User: my budget is 500 euros; my dog is called Biscuit\nTool find: hub: HUB-9"
    second = "User: actually my budget is 700 euros; my dog is called Biscuit"
    merged = merge([first, second], budget_tokens=40, count=count)
    assert merged.count("Biscuit") == 1
    assert "700 euros" in merged
    assert "HUB-9" in merged
    tight = merge([first, second], budget_tokens=16, count=count)
    assert "500" not in tight


def test_merging_reads_a_models_prose() -> None:
    merged = merge(
        ["The user lives in Lyon and never eats fish.", "User: my train is TGV-6607"], budget_tokens=40, count=count
    )
    assert "Lyon" in merged
    assert "TGV-6607" in merged


def test_masking_replaces_tool_output_by_its_size() -> None:
    turns = [turn(0, "look", "done", *called("read", {"path": "a.txt"}, "x" * 4000))]
    text = mask(turns, budget_tokens=100, count=count)
    assert (
        text == 'User: look\nCall read: {"path": "a.txt"}\nTool read: [output of 1000 tokens removed]\nAssistant: done'
    )


def test_an_elided_text_keeps_its_ends_and_the_facts_of_its_middle() -> None:
    filler = "and so it went on and on for a while. " * 60
    text = "The report begins here. " + filler + "The key is KEY-7731. " + filler + "The report ends here."
    cut = elide(text, budget_tokens=120, count=count)
    assert cut.startswith("The report begins here.")
    assert cut.endswith("The report ends here.")
    assert "KEY-7731" in cut
    assert "tokens removed" in cut


def test_the_counter_is_called_a_few_times_only_and_time_grows_with_length() -> None:
    calls = 0

    def counted(text: str) -> int:
        nonlocal calls
        calls += 1
        return count(text)

    def turns(number: int) -> list[Turn]:
        return [
            turn(i, f"My part number {i} is PX-{i}Z and I need {i + 2} of them by May {i % 28 + 1}.", ADVICE)
            for i in range(number)
        ]

    extract(turns(100), budget_tokens=4000, count=counted)
    assert calls <= 12
    began = time.perf_counter()
    extract(turns(50), budget_tokens=2000, count=count)
    short = time.perf_counter() - began
    began = time.perf_counter()
    extract(turns(400), budget_tokens=16000, count=count)
    assert time.perf_counter() - began < 30 * max(short, 0.01)
