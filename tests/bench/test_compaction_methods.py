"""What methods keep, what is counted of it, and that it can be sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.compaction import facts, figures
from bench.compaction.context import Answer, Context, Sizer, items_of, units
from bench.compaction.facts import TEMPLATES
from bench.compaction.figures import EXTRACTED, Look, Seen
from bench.compaction.generate import Conversation, generate
from bench.compaction.ours import Ours
from bench.compaction.peers import Article, DropOldest, Full, HeadTail, Oracle, Rolling
from bench.compaction.render import failures, families, orphans
from bench.compaction.score import Kept
from bench.compaction.writer import LOOP, Answers
from compression.budget import Policy
from gateway.sessions.tokens import ModelTokens

pytestmark = pytest.mark.anyio
BUDGET = 1200


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    return generate(3, turns=60)


@pytest.fixture(scope="module")
def sizer(model_dir: Path, conversation: Conversation) -> Sizer:
    return Sizer(ModelTokens.load(model_dir, name="m"), conversation.system)


async def short(messages: list[dict[str, Any]], most_tokens: int) -> Answer:
    """A summariser that says little."""
    return Answer("They talked.", finished=True, prompt_tokens=0, output_tokens=3)


async def test_a_context_is_counted_as_its_prompt_is_rendered(conversation: Conversation, sizer: Sizer) -> None:
    context = await Full(sizer).compact(conversation.turns, 0)
    assert context.tokens == sizer.tokens.count_messages(sizer.prompt(context))


async def test_no_method_keeps_more_than_its_budget_or_half_a_tool_call(
    conversation: Conversation, sizer: Sizer
) -> None:
    methods = (DropOldest(sizer), HeadTail(sizer), Oracle(sizer, conversation.told), Article(sizer, short))
    for method in (*methods, Rolling(sizer, short, 100)):
        for turns in (40, 60):
            context = await method.compact(conversation.turns[:turns], BUDGET)
            assert context.tokens <= BUDGET, method.name
            assert orphans(context.items) == 0, method.name
            assert context.items, method.name


async def test_the_oracle_keeps_what_it_has_room_for_and_nothing_else(conversation: Conversation, sizer: Sizer) -> None:
    kept = Kept((await Oracle(sizer, conversation.told).compact(conversation.turns, BUDGET)).text)
    assert all(kept.survives(fact) for fact in conversation.facts)


async def test_a_rolling_summary_that_is_short_leaves_its_room_to_turns(
    conversation: Conversation, sizer: Sizer
) -> None:
    context = await Rolling(sizer, short, 400).compact(conversation.turns, BUDGET)
    largest = max(sizer.of(items_of(unit)) for unit in units(conversation.turns))
    assert context.tokens > BUDGET - largest


async def test_ours_stays_below_its_target_and_renders_in_every_template(
    conversation: Conversation, sizer: Sizer
) -> None:
    ours = Ours(EXTRACTED, sizer, Policy(strategy="extract"), window=2048, reserve=128)
    made = 0
    for number in range(1, len(conversation.turns) + 1):
        turns = conversation.turns[:number]
        if await ours.step(turns) is not None:
            made += 1
            assert ours.context(turns).tokens <= 0.7 * 2048 - 128
            assert orphans(ours.context(turns).items) == 0
    assert made > 3
    for family in families(TEMPLATES.glob("*.jinja")):
        assert failures(family, conversation.system, lambda place: ours.context(conversation.turns, place)) == []


async def test_a_small_run_ends_in_the_figures(model_dir: Path) -> None:
    shape = facts.Shape(window=2048, reserve=128, turns=40, points=(1, 2), extracted=2, modelled=0)
    tokens = ModelTokens.load(model_dir, name="m")
    run = facts.Run(shape, tokens, families(TEMPLATES.glob("smol*.jinja")), 0.0)
    await facts.extracted(run, None, None, (1, 2))
    result = facts.result(run, run)
    rows = {(row["method"], row["compactions"]): row for row in result["rows"]}
    assert rows["full context", 2]["lost"] == rows["oracle", 2]["lost"] == 0
    assert rows["drop oldest", 2]["kept_tokens"] <= rows[EXTRACTED, 2]["kept_tokens"]
    assert rows[EXTRACTED, 2]["lost"] < rows["drop oldest", 2]["lost"]
    assert (result["orphans"], result["template_failures"], result["contexts_rendered"]) == (0, 0, 16)
    assert result["sources"][EXTRACTED] == {"extracted": 4}


def test_half_a_tool_call_is_an_orphan(conversation: Conversation) -> None:
    calling = next(turn for turn in conversation.turns if any(item.type == "function_call" for item in turn.output))
    answered = next(turn for a, turn in pairwise(conversation.turns) if a is calling)
    assert orphans(calling.output) == 1
    assert orphans(answered.input) == 1
    assert orphans((*calling.output, *answered.input)) == 0


def test_a_context_that_a_template_hides_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "deaf.jinja").write_text("{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}")
    (deaf,) = families(tmp_path.glob("*.jinja"))
    context = Context(generate(3, turns=2).turns[0].input, 0)
    (failure, *_) = failures(deaf, "Be kind.", lambda place: context)
    assert "left out" in failure


def test_what_the_model_wrote_is_read_again(tmp_path: Path) -> None:
    answer = Answer("Said.", finished=True, prompt_tokens=9, output_tokens=2)
    Answers(tmp_path / "answers.jsonl").keep("a key", answer)
    assert Answers(tmp_path / "answers.jsonl").known == {"a key": answer}


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("I'll have to eat a lot of bread. " * 5, True),
        ("one two three four five six seven eight nine ten " * 2, False),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaa", False),
    ],
)
def test_an_answer_that_only_repeats_itself_is_noticed(text: str, loops: bool) -> None:
    assert (LOOP.search(text) is not None) is loops


def look(method: str, survives: Sequence[bool], *, compactions: int = 5, seed: int = 1) -> Look:
    seen = tuple(
        Seen(f"f{at}", "id", at % 2 == 0, at % 2 == 0, 1, kept, kept, None) for at, kept in enumerate(survives)
    )
    return Look(method, seed, False, compactions, 100, 90, seen)


def test_ours_is_held_against_the_best_of_the_others_by_group() -> None:
    looks = [
        look(EXTRACTED, [True, False, True, True]),
        look("drop oldest", [False, False, False, True]),
        look("head and tail", [False, False, True, False]),
        look("full context", [True] * 4),
    ]
    ratios = figures.over_best_other(looks, EXTRACTED, (5, 10), modelled=False)
    assert ratios["all"]["5"]["ratio"] == ratios["all"]["worst"] == round(1 / 3, 3)
    assert ratios["unruled"]["worst"] == 1.0
    assert (ratios["ruled"]["5"]["best_other"], ratios["ruled"]["worst"]) == ("head and tail", 0.0)


def test_a_method_that_was_not_in_every_conversation_is_no_rival() -> None:
    looks = [look(EXTRACTED, [False]), look(EXTRACTED, [False], seed=2), look("drop oldest", [True])]
    assert figures.over_best_other(looks, EXTRACTED, (5,), modelled=False)["all"] == {"worst": None}


def test_a_row_has_spread_and_identifiers() -> None:
    row = figures.row([look("drop oldest", [True, False]), look("drop oldest", [False, False], seed=2)])
    assert (row["lost"], row["lost_share"], row["lost_share_spread"]) == (3, 0.75, [0.5, 1.0])
    assert row["identifier_survival"] == 0.5


def test_every_figure_stands_on_the_page() -> None:
    run = facts.Run(facts.Shape(), None, (), 0.0)  # type: ignore[arg-type]  # nothing is counted
    run.looks = [look(EXTRACTED, [True, False]), look("drop oldest", [False, False])]
    result = facts.result(run, run)
    page = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
    assert [name for name in (*result, *result["rows"][0]) if f"`{name}`" not in page] == []
    assert json.dumps(result)
