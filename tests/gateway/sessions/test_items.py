"""Items and chat messages are two shapes of one conversation; meaning is what both have in common."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest, GatewayError, Unprocessable
from gateway.sessions.items import (
    EMPTY_MEANING,
    check_pairs,
    function_call,
    function_call_output,
    has_images,
    items_from_messages,
    meaning,
    message,
    messages_from_items,
    open_calls,
    parse_items,
    reasoning,
    root_meaning,
    split_system,
)

TOOLED: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "look it up",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1, "b": 2}'}},
            {"id": "c2", "type": "function", "function": {"name": "get", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    {"role": "assistant", "content": "Mixed."},
]


def test_messages_survive_the_way_to_items_and_back_and_results_name_their_function() -> None:
    named = [{**msg, "name": "get"} if msg["role"] == "tool" else msg for msg in TOOLED]
    assert messages_from_items(items_from_messages(TOOLED)) == named
    assert messages_from_items(items_from_messages(TOOLED[2:]), {"c1": "get", "c2": "get"}) == named[2:]


texts = st.text(max_size=20)
plain_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}), max_size=8
)


@given(plain_messages)
def test_plain_conversations_survive_too(messages: list[dict[str, Any]]) -> None:
    merged = messages_from_items(items_from_messages(messages))
    assert merged == messages


def test_parts_that_are_all_text_become_one_string_and_images_stay_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    picture = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}]
    items = items_from_messages([{"role": "user", "content": parts}, {"role": "user", "content": picture}])
    assert messages_from_items(items)[0]["content"] == "ab"
    assert messages_from_items(items)[1]["content"] == picture
    assert has_images(items)
    assert not has_images(items[:1])


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "video"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc"}]}, None),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}]}, None),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, None),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(bad: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BadRequest) as refused:
        items_from_messages([bad])
    assert refused.value.param is not None
    assert param is None or refused.value.param == param


def test_items_of_the_session_api_are_a_string_messages_or_items() -> None:
    assert parse_items("hi") == [message("user", "hi")]
    given = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "reasoning", "summary": []},
    ]
    kinds = [item.type for item in parse_items(given)]
    assert kinds == ["message", "function_call", "function_call_output", "reasoning"]


@pytest.mark.parametrize(
    "bad",
    [
        [],
        5,
        ["x"],
        [{"type": "robot"}],
        [{"type": "function_call", "call_id": "c"}],
        [{"type": "function_call_output", "output": "x"}],
        [{"type": "function_call_output", "call_id": "c"}],
    ],
)
def test_wrong_items_are_refused(bad: Any) -> None:
    with pytest.raises(BadRequest):
        parse_items(bad)


def test_system_messages_at_the_front_are_the_system_prompt() -> None:
    items = items_from_messages(
        [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
    )
    system, rest = split_system(items)
    assert system == "a\n\nb"
    assert [item.text for item in rest] == ["c"]
    assert split_system(rest)[0] is None


def test_a_tool_output_must_answer_an_open_call_and_every_call_needs_one() -> None:
    call, output = function_call("c1", "f", "{}"), function_call_output("c1", "1")
    assert open_calls([call]) == {"c1": "f"}
    assert open_calls([call, output]) == {}
    check_pairs({"c1": "f"}, [output])
    check_pairs({}, [message("user", "x"), call, output])
    for waiting, items in (({}, [output]), ({"c1": "f"}, [message("user", "x")]), ({"c1": "f", "c2": "f"}, [output])):
        with pytest.raises(Unprocessable):
            check_pairs(waiting, items)


def test_meaning_ignores_reasoning_spacing_ids_and_the_order_of_keys() -> None:
    ours = [reasoning("hm"), message("assistant", "Hi "), function_call("c1", "f", '{"a": 1, "b": 2}')]
    theirs = [message("assistant", [{"type": "text", "text": "Hi"}]), function_call("x9", "f", '{"b":2,"a":1}')]
    assert meaning(EMPTY_MEANING, ours) == meaning(EMPTY_MEANING, theirs)


def test_meaning_tells_roles_texts_arguments_and_system_prompts_apart() -> None:
    variants = [
        meaning(EMPTY_MEANING, [message("user", "a")]),
        meaning(EMPTY_MEANING, [message("assistant", "a")]),
        meaning(EMPTY_MEANING, [message("user", "b")]),
        meaning(EMPTY_MEANING, [function_call("c", "a", "not json")]),
        meaning(EMPTY_MEANING, [function_call_output("c", "a")]),
        meaning(root_meaning("s"), [message("user", "a")]),
    ]
    assert len(set(variants)) == len(variants)
    assert root_meaning(None) == root_meaning("") == EMPTY_MEANING


def test_every_refusal_here_is_a_gateway_error() -> None:
    with pytest.raises(GatewayError):
        items_from_messages([{"role": "user", "content": None}])
