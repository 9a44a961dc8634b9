"""Where a summary stands is chosen by rendering it through each family's own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from compression.conversation import Item, Turn
from compression.segments import READ, Segment
from compression.view import Placement, View, fold
from gateway.sessions.items import message, messages_from_items
from gateway.sessions.placing import chosen_placement, stands
from gateway.sessions.template import TemplateRefused
from tests.gateway.sessions.families import FAMILIES, Loader

pytestmark = pytest.mark.model


def turn(id: str, asked: str, *output: Item) -> Turn:
    return Turn(id, None, int(id), "completed", (message("user", asked),), output or (message("assistant", "so"),))


TURNS = (turn("1", "first words"), turn("2", "gone"), turn("3", "gone too"), turn("4", "kept words"))
VIEW = View("v", (Segment("s", ("2", "3"), "- the summary's words", 5, "extracted"),))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chosen_placement_renders_in_order_and_says_nothing_twice(family: str, load: Loader) -> None:
    model = load(family)
    folded = fold(TURNS, VIEW, placement=model.placement)
    system = [{"role": "system", "content": "Be brief." + folded.system}] if FAMILIES[family].system else []
    text = model.prompt_text([*system, *messages_from_items((*folded.items, message("user", "new words")))])
    places = [text.find(words) for words in ("first words", "the summary's words", "kept words", "new words")]
    assert places == sorted(places)
    assert places[0] >= 0
    assert text.count("the summary's words") == 1
    assert "gone" not in text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_a_summary_between_the_first_turn_and_the_kept_ones(family: str, load: Loader) -> None:
    """So the prefix before it keeps its cache."""
    assert load(family).placement in ("exchange", "in_user")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_path_goes_on_after_a_summary_as_after_any_turn(family: str, load: Loader) -> None:
    """The ids up to the first turn are those of the raw path: nothing of the cache before the summary is lost."""
    model = load(family)
    system = [{"role": "system", "content": "Be brief."}] if FAMILIES[family].system else []
    raw = model.render([*system, *messages_from_items(i for t in TURNS for i in t.items)])
    seen = model.render([*system, *messages_from_items(fold(TURNS, VIEW, placement=model.placement).items)])
    first = model.render([*system, *messages_from_items(TURNS[0].input)])
    kept = len(first) // 4 * 4
    assert raw[: kept - 16] == seen[: kept - 16]


def alternating(messages: Sequence[dict[str, Any]]) -> str:
    """A template as strict as Mistral's first ones, which takes no acknowledgement either."""
    roles = [m["role"] for m in messages if m["role"] != "system"]
    if any(role != ("user", "assistant")[at % 2] for at, role in enumerate(roles)):
        raise TemplateRefused("roles must alternate")
    if any(m["content"] == READ for m in messages):
        raise TemplateRefused("no acknowledgements here")
    return "\n".join(m["content"] for m in messages)


def only_system(messages: Sequence[dict[str, Any]]) -> str:
    """A template that cuts user messages short and refuses two in a row."""
    if any(m["content"] == READ for m in messages):
        raise TemplateRefused("no acknowledgements here")
    return "\n".join(m["content"] if m["role"] == "system" else m["content"][:16] for m in messages)


@pytest.mark.parametrize(("render", "placement"), [(alternating, "in_user"), (only_system, "in_system")])
def test_a_template_that_does_not_take_an_exchange_gets_the_next_placement(render: Any, placement: Placement) -> None:
    assert chosen_placement(render) == placement
    assert stands(render, placement)
    assert not stands(render, "exchange")
