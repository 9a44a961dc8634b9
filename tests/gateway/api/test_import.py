"""A file of exported lines is held to what the API allows one by one: its pins, its policy, the types of its fields."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from compression.conversation import Item, Turn, open_calls
from compression.view import RAW, held
from gateway.sessions.items import message
from gateway.sessions.pins import most_pinned
from gateway.sessions.sizing import around, counter, sizes
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served
from tests.gateway.talks import WINDOW, summarising, words

Line = dict[str, Any]
HEAD: Line = {"object": "session", "format": 1, "model": "echo"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("import"), {"echo": summarising("no use")}) as running:
        yield running


def sent(gateway: Served, *lines: Line) -> httpx.Response:
    return gateway.client.post(
        "/v1/sessions/import",
        content=b"\n".join(map(orjson.dumps, lines)),
        headers={"content-type": "application/x-ndjson"},
    )


def line(number: int, parent: int | None = None, size: int = 660, **more: Any) -> Line:
    said = words(number, size)
    return {
        "object": "turn",
        "id": f"t{number}",
        "parent_id": None if parent is None else f"t{parent}",
        "status": "completed",
        "input": [message("user", said).payload],
        "output": [message("assistant", said[:120]).payload],
        **more,
    }


def path(pinned: range) -> list[Line]:
    lines = [line(number, number - 1 or None, pinned=number in pinned) for number in range(1, 9)]
    return [{**HEAD, "head_turn_id": "t8"}, *lines]


def test_a_file_pins_as_many_turns_as_one_may_pin_one_by_one(gateway: Served) -> None:
    assert sent(gateway, *path(range(5))).status_code == 201
    with nothing_saved(gateway):
        error = refused(sent(gateway, *path(range(1, 9))), 409, "pin_budget")
    assert error["details"]["limit"] == WINDOW // 2
    assert 8 * 780 < error["details"]["requested"] < 8 * 780 + 600
    assert "'t8'" in error["message"]
    whole = sent(gateway, *path(range(0))).json()["id"]
    pins = [gateway.client.put(f"/v1/sessions/{whole}/turns/{turn}/pin").status_code for turn in range(1, 9)]
    free = pins.count(200)
    assert sent(gateway, *path(range(1, free + 1))).status_code == 201
    refused(sent(gateway, *path(range(1, free + 2))), 409, "pin_budget")


def test_pins_of_a_file_count_on_their_own_path(gateway: Served) -> None:
    branches = [line(number, pinned=True) for number in range(1, 9)]
    assert sent(gateway, HEAD, *branches).status_code == 201


def test_a_long_system_prompt_and_tools_count_too(gateway: Served) -> None:
    with nothing_saved(gateway):
        refused(sent(gateway, {**HEAD, "system": "x" * 3800}, line(1, pinned=True)), 409, "pin_budget")
    assert sent(gateway, {**HEAD, "system": "x" * 3800}, line(1)).status_code == 201


def test_a_file_names_no_summariser_that_is_not_served(gateway: Served) -> None:
    policy = {"summariser": "nobody"}
    with nothing_saved(gateway):
        error = refused(sent(gateway, {**HEAD, "policy": policy}), 400, "model_not_found", "policy.summariser")
    assert "served are: echo" in error["message"]
    assert sent(gateway, {**HEAD, "policy": {"summariser": "echo"}}).status_code == 201


def test_a_text_that_no_tokenizer_would_take_is_refused_with_the_numbers(gateway: Served) -> None:
    tokens = gateway.gateway.models.tokens("echo")
    assert tokens is not None
    with nothing_saved(gateway):
        error = refused(sent(gateway, HEAD, line(1, size=tokens.max_bytes + 1)), 413, "request_too_large")
    assert error["details"] == {"bytes": tokens.max_bytes + 1, "limit": tokens.max_bytes}
    assert "'t1'" in error["message"]


@pytest.mark.parametrize(
    "lines",
    [
        [{**HEAD, "head_turn_id": []}, line(1)],
        [{**HEAD, "head_turn_id": {}}, line(1)],
        [{**HEAD, "head_turn_id": 1}, line(1)],
        [{**HEAD, "head_turn_id": "t9"}, line(1)],
        [HEAD, line(1, pinned="true")],
        [HEAD, line(1, pinned=1)],
        [HEAD, line(1, parent_id=["t1"])],
        [HEAD, line(1, id=["t1"])],
        [HEAD, line(1, status=["completed"])],
        [HEAD, line(1, model={"a": 1})],
    ],
)
def test_fields_of_another_type_are_refused(gateway: Served, lines: list[Line]) -> None:
    with nothing_saved(gateway):
        refused(sent(gateway, *lines), 400, "invalid_import")


def _tree(chance: random.Random) -> list[Turn]:
    """Turns of which some call, and some answer what was called before, on a random tree."""
    turns: list[Turn] = []
    for number in range(chance.randint(1, 12)):
        parent = chance.choice([None, *(turn.id for turn in turns)])
        items = [message("user", "x" * chance.randint(1, 40))]
        if chance.random() < 0.5:
            items.append(Item("function_call", {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}))
        turns.append(Turn(f"t{number}", parent, number, "completed", tuple(items)))
    return turns


def test_what_stands_whole_on_a_tree_is_the_most_of_its_paths() -> None:
    chance = random.Random(5)
    for _ in range(200):
        turns = _tree(chance)
        pinned = frozenset(turn.id for turn in turns if chance.random() < 0.4)
        waiting = {turn.id for turn in turns if open_calls(turn.items)}
        sized = sizes(turns, RAW, frozenset(), prompt_tokens=0, count=counter(None), around=around(None)).turns
        tokens = {turn.id: turn.tokens for turn in sized}
        by_id, most = {turn.id: turn for turn in turns}, 0
        for turn in turns:
            ids: list[str] = []
            up: str | None = turn.id
            while up is not None:
                ids.insert(0, up)
                up = by_id[up].parent_id
            most = max(most, sum(tokens[id] for id in held(ids, pinned, waiting) & {*ids}))
        assert most_pinned(turns, pinned, None)[0] == most
