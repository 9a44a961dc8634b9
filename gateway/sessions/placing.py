"""Where a summary stands in a prompt: chosen by rendering it through the model's own template.

    exchange   system | first turn | user: summary, assistant: Understood. | kept turns     the prefix before it stays
    in_user    system | first turn | user: summary + next message | ...                     where roles may not repeat
    in_system  system + summary | first turn | ...                                           changes everything after it

A template that hides it, moves it or refuses it cannot take that placement. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from compression.conversation import Item, Turn
from compression.segments import Segment
from compression.view import Placement, View, fold
from gateway.sessions.items import message, messages_from_items
from gateway.sessions.template import TemplateRefused

WORDS = ("7a3cf01e", "7a3cf02e", "7a3cf03e", "7a3cf04e", "7a3cf05e", "7a3cf06e")  # no template writes them of itself


def chosen_placement(render: Callable[[Sequence[dict[str, Any]]], str]) -> Placement:
    """The first placement in which every word of a small conversation is rendered once and in order."""
    placements: tuple[Placement, ...] = get_args(Placement)
    return next((place for place in placements if stands(render, place)), "exchange")


def stands(render: Callable[[Sequence[dict[str, Any]]], str], placement: Placement) -> bool:
    """Whether a summary placed so is read where it belongs: with a system prompt, or without where none is taken."""
    system, first_user, first_answer, summary, user, answer = WORDS
    turns = [_turn("1", first_user, first_answer), _turn("2", "x", "y"), _turn("3", user, answer)]
    view = View("v", (Segment("s", ("2",), summary, 1, "extracted"),))
    folded = fold(turns, view, placement=placement)
    messages = messages_from_items((*folded.items, message("user", "z")))
    placed_in_system = [summary] if folded.system else []
    order = [*placed_in_system, first_user, first_answer, *([] if placed_in_system else [summary]), user, answer]
    text = "\n\n".join(part for part in (system, folded.system) if part)
    try:
        rendered = render([{"role": "system", "content": text}, *messages])
        order = [system, *order]
    except TemplateRefused:
        if placement == "in_system":
            return False
        try:
            rendered = render(messages)
        except TemplateRefused:
            return False
    at = [rendered.find(word) for word in order]
    return at == sorted(at) and at[0] >= 0 and all(rendered.count(word) == 1 for word in order)


def _turn(id: str, asked: str, answered: str) -> Turn:
    inputs: tuple[Item, ...] = (message("user", asked),)
    return Turn(id, None, int(id), "completed", inputs, (message("assistant", answered),))
