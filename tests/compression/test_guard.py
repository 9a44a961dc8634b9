"""The guard sees facts of every kind, in several languages, and which of them a later statement changed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.guard import Ledger, facts_of
from compression.patterns import spans
from tests.compression.conversations import called, message, talk, turn

LONG_IDENTIFIERS = {
    "dotted": "com.example." + "_".join(["very", "long"] * 12) + ".Handler.run",
    "called": "billing." + "_".join(["very", "long"] * 12) + ".run()",
    "of many parts": ".".join(f"part_{number}" for number in range(14)),
    "number at the end": "-".join(["abcdefgh"] * 11) + "-42",
    "API key": "sk-proj-" + "aB3_dE-6" * 18,
    "JWT": "eyJ" + "hbGci0iJ" * 4 + ".eyJ" + "zdWIiOi7" * 14 + "." + "SflKxw_c" * 5,
    "digest": "9f3ab21c" * 16,
}


@pytest.mark.parametrize("value", LONG_IDENTIFIERS.values(), ids=LONG_IDENTIFIERS)
def test_a_long_identifier_is_one_fact_and_whole(value: str) -> None:
    assert ("identifier", value) in [(span.kind, span.value) for span in spans(f"Please use {value} from now on.")]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("My order is ORD-48213, please check.", "identifier", "ORD-48213"),
        ("see commit 9f3ab21 for it", "identifier", "9f3ab21"),
        ("the run 550e8400-e29b-41d4-a716-446655440000 failed", "identifier", "550e8400-e29b-41d4-a716-446655440000"),
        ("set max_retry_count higher", "identifier", "max_retry_count"),
        ("call getOrder() twice", "identifier", "getOrder()"),
        ("the class OrderService is slow", "identifier", "OrderService"),
        ("start it with --dry-run", "identifier", "--dry-run"),
        ("host 10.0.0.5:5432 is down", "identifier", "10.0.0.5:5432"),
        ("it is in `the cache` now", "identifier", "the cache"),
        ("ticket #4411 is open", "identifier", "#4411"),
        ("see https://a.example/b?c=1.", "url", "https://a.example/b?c=1"),
        ("write to anna@firm.example.", "email", "anna@firm.example"),
        ("it is in src/app/config.yaml now", "path", "src/app/config.yaml"),
        ("look at /var/log/app.log first", "path", "/var/log/app.log"),
        (r"saved as C:\work\plan.docx, I think", "path", r"C:\work\plan.docx"),
        ("the notebook analysis.ipynb has it", "path", "analysis.ipynb"),
        ("call me on +49 30 1234 5678", "phone", "+49 30 1234 5678"),
        ("we run 2.13.4 there", "version", "2.13.4"),
        ("we meet on March 3, 2024", "date", "March 3, 2024"),
        ("due 2024-03-05 at the latest", "date", "2024-03-05"),
        ("every Tuesday we train", "date", "every Tuesday"),
        ("bis zum 3. Mai bitte", "date", "3. Mai"),
        ("le 12 juin nous partons", "date", "12 juin"),
        ("the train leaves at 7:45 pm", "time", "7:45 pm"),
        ("it cost $1,200.50 in all", "money", "$1,200.50"),
        ("ich zahle 1.200 € dafür", "money", "1.200 €"),
        ("it took 30 minutes", "measure", "30 minutes"),
        ("the box weighs 4.5 kg", "measure", "4.5 kg"),
        ("I lead five engineers", "number", "five"),
        ("we are 14 now", "number", "14"),
        ('the file says "do not ship"', "quoted", "do not ship"),
        ("sie las „Der Prozess“ gern", "quoted", "Der Prozess"),
        ("my dog is called Biscuit now", "name", "Biscuit"),
        ("I train at Serenity Yoga downtown", "name", "Serenity Yoga"),
        ("I met Dr. Ana Souza there", "name", "Dr. Ana Souza"),
        ("meine Ärztin ist Frau Öztürk dort", "name", "Frau Öztürk"),
        ("我叫王小明，住得很远", "name", "王小明"),
        ("请联系李经理", "name", "李"),
        ("田中さんに聞いてください", "name", "田中"),
        ("来週バルセロナへ行きます", "name", "バルセロナ"),
        ("예약은 김민수 씨 말고 박지훈님", "name", "박지훈"),
        ("予算は一人3万2千円です", "money", "3万2千円"),
        ("部長の佐々木さんは来ません", "name", "佐々木"),
        ("la salle s'appelle Le Clos des Tilleuls ici", "name", "Clos des Tilleuls"),
        ("my account is 7719 3382 there", "identifier", "7719 3382"),
        ("it is beacon.cellar_batch that fails", "identifier", "beacon.cellar_batch"),
        ("预算是三千元左右", "money", "三千元"),
        ("予算は5万円です", "money", "5万円"),
        ("我们3月5日开会", "date", "3月5日"),
        ("下周三之前", "date", "下周三"),
        ("会议在下午三点", "time", "下午三点"),
        ("我有两只猫", "measure", "两只"),
        ("我在读《三体》这本书", "quoted", "三体"),
        ("合言葉は「青い鳥」です", "quoted", "青い鳥"),
        ("订单号是AB-9931请查一下", "identifier", "AB-9931"),
        ("设置max_tokens参数", "identifier", "max_tokens"),
    ],
)
def test_a_fact_is_seen(text: str, kind: str, value: str) -> None:
    german = any(word in text for word in ("meine", "ich", "bis zum"))
    assert (kind, value) in [(span.kind, span.value) for span in spans(text, german=german)]


@pytest.mark.parametrize(
    "text",
    [
        "I think so.",
        "Where do we go?",
        "the 1st try",
        "state-of-the-art",
        "Das Haus ist schön",
        "Achten Sie auf Angebote von Firmen",
    ],
)
def test_plain_words_are_no_facts(text: str) -> None:
    assert [span for span in spans(text, german=True) if span.kind in ("identifier", "name")] == []


@given(st.text())
def test_spans_lie_apart_in_order_within_any_text(text: str) -> None:
    found = spans(text)
    assert all(text[span.start : span.end] == span.value for span in found)
    assert all(left.end <= right.start for left, right in pairwise(found))


def live(*pairs: tuple[str, str]) -> list[str]:
    return [fact.value for fact in Ledger(facts_of(talk(*pairs))).facts]


@pytest.mark.parametrize(
    ("before", "after", "old", "new"),
    [
        ("My budget is 500 euros.", "Actually my budget is 700 euros.", "500 euros", "700 euros"),
        ("The launch is on Monday.", "The launch moved to Thursday.", "Monday", "Thursday"),
        ("My budget is 500 euros.", "Make it 800 euros instead.", "500 euros", "800 euros"),
        ("Our meeting is at 9:30.", "Our meeting is at 10:15.", "9:30", "10:15"),
        ("My manager is called Rachel.", "My manager is no longer Rachel but Omar.", "Rachel", "Omar"),
        ("Das Treffen ist am Montag.", "Das Treffen wurde auf Freitag verschoben.", "Montag", "Freitag"),
        ("La réunion est à 14h30.", "Finalement la réunion est à 16h00.", "14h30", "16h00"),
        ("我的预算是三千元。", "我的预算改成五千元。", "三千元", "五千元"),
        ("预算大概两万五千元。", "其实预算可以提高到三万元。", "两万五千元", "三万元"),
        ("会議は4月2日です。", "会議は4月9日に変更です。", "4月2日", "4月9日"),
    ],
)
def test_a_later_statement_changes_a_value(before: str, after: str, old: str, new: str) -> None:
    facts = {fact.value: fact for fact in facts_of(talk((before, "Noted."), (after, "Noted.")))}
    assert new in live((before, "Noted."), (after, "Noted."))
    assert facts[new].superseded_by is None
    if "but" not in after:  # where the new clause names the old value, the value is in it
        assert facts[old].superseded_by is not None
        assert old not in live((before, "Noted."), (after, "Noted."))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Order A-1 costs 5 euros.", "Order B-2 costs 7 euros."),
        ("My sister lives in Cologne, she is 31.", "My brother is 28."),
        ("The hotel costs 120 euros.", "The flight costs 450 euros."),
    ],
)
def test_different_things_do_not_change_each_other(before: str, after: str) -> None:
    assert all(fact.superseded_by is None for fact in facts_of(talk((before, "Noted."), (after, "Noted."))))


def test_the_same_field_of_the_same_call_changes_and_of_another_call_does_not() -> None:
    turns = [
        turn(0, "check", "", *called("get_job", {"id": "J-1"}, {"status": "S-17"}, "a")),
        turn(1, "check", "", *called("get_job", {"id": "J-2"}, {"status": "S-18"}, "b")),
        turn(2, "check", "", *called("get_job", {"id": "J-1"}, {"status": "S-19"}, "c")),
    ]
    changed = [fact.value for fact in facts_of(turns) if fact.superseded_by is not None]
    assert changed == ["S-17"]


def test_facts_come_from_every_kind_of_item_in_order() -> None:
    from compression.conversation import Item

    turns = [
        turn(
            0,
            "Where is ORD-1?",
            "It left from Lyon.",
            Item(
                "reasoning",
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "look up ORD-1 of R-77"}]},
            ),
            *called("find", {"order": "ORD-1"}, {"parcel": {"hub": "HUB-9", "weight": "4 kg"}}),
        )
    ]
    found = [(fact.value, fact.role) for fact in facts_of(turns)]
    assert found == [
        ("ORD-1", "user"),
        ("ORD-1", "reasoning"),
        ("R-77", "reasoning"),
        ("ORD-1", "call"),
        ("HUB-9", "tool"),
        ("4 kg", "tool"),
        ("Lyon", "assistant"),
    ]
    assert [fact.clause for fact in facts_of(turns) if fact.value == "HUB-9"] == ["parcel.hub: HUB-9"]


def test_a_negation_stays_with_what_it_negates() -> None:
    facts = facts_of(talk(("By the way, do not ship to 12 Elm Road, please.", "Ok.")))
    assert all("do not ship" in fact.clause for fact in facts)
    assert facts


@pytest.mark.parametrize(
    ("value", "text", "there"),
    [
        ("30", "it took 30 minutes", True),
        ("30", "1300 people", False),
        ("30", "30.5 degrees", False),
        ("1,000", "costs 1000 euros", True),
        ("five", "5 engineers", True),
        ("ORD-1", "ord-1 is late", True),
        ("ORD-1", "ORD-12 is late", False),
        ("Ｔ１２", "T12", True),
        ("三千元", "预算三千元以内", True),
        ("两万五千元", "预算25000元", True),
        ("3万2千円", "32,000円まで", True),
        ("Anna", "Annabelle", False),
    ],
)
def test_a_value_is_missed_only_where_it_is_absent(value: str, text: str, there: bool) -> None:
    from compression.guard import Fact

    ledger = Ledger((Fact("name", value, value, "t", "user"),))
    assert (ledger.missing(text) == ()) is there
    assert bool(ledger.kept(text)) is there


def test_the_ledger_has_lines_and_keeps_the_weightiest() -> None:
    turns = talk(("My code is K-9921. I own 3 lamps.", "Lamps come in 40 shapes."))
    ledger = Ledger(facts_of(turns))
    assert ledger.lines() == ("User: My code is K-9921", "User: I own 3 lamps", "Assistant: Lamps come in 40 shapes")
    assert ledger.lines(1) == ("User: My code is K-9921",)


@given(st.lists(st.text(), max_size=4), st.dictionaries(st.text(), st.integers() | st.text() | st.none(), max_size=4))
def test_odd_text_and_payloads_never_raise(texts: list[str], payload: dict[str, object]) -> None:
    from compression.conversation import Item

    items = [message("user", text) for text in texts]
    items += [Item(kind, payload) for kind in ("function_call", "function_call_output", "reasoning", "message")]  # type: ignore[arg-type]
    from compression.conversation import Turn

    Ledger(facts_of([Turn("t", None, 0, "completed", tuple(items))])).lines()
