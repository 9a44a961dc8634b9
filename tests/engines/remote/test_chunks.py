"""OpenAI's chunks as servers really send them."""

from __future__ import annotations

from typing import Any

import pytest

from engines.contract import Delta, ToolCallDelta, Usage
from engines.remote.chunks import NO_ID, ChunkReader


def chat(delta: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta} | choice]}


def read(*chunks: dict[str, Any]) -> list[Delta]:
    """The Deltas of an answer that ended."""
    reader = ChunkReader()
    deltas = [delta for chunk in chunks if (delta := reader.read(chunk)) is not None]
    last = reader.take_last(ended=True)
    return [*deltas, last] if last is not None else deltas


END = chat({}, finish_reason="stop")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_two_names(name: str) -> None:
    assert read(chat({name: "hm"}), chat({"content": "yes"}), END)[0] == Delta(reasoning="hm")


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "yes"}]
    assert read(chat({"content": parts}))[0] == Delta("yes", reasoning="hm")


def test_tool_calls_come_in_pieces() -> None:
    calls = [
        chat(
            {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]}
        ),
        chat({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
        chat({"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]}),
        chat({}, finish_reason="tool_calls"),
    ]
    deltas = read(*calls)
    assert [delta.tool_calls for delta in deltas[:3]] == [
        (ToolCallDelta(0, "c1", "f", ""),),
        (ToolCallDelta(0, None, None, '{"a"'),),
        (ToolCallDelta(1, "c2", "g", "{}"),),
    ]
    assert deltas[-1].finish == "tool_calls"


def test_a_tool_call_without_index_and_with_an_object_is_read() -> None:
    deltas = read(chat({"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]}))
    assert deltas[0].tool_calls == (ToolCallDelta(0, "c", "f", '{"a":1}'),)


def test_usage_may_come_with_the_finish_or_after_it_or_never() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    told = Usage(5, 2, 4)
    assert read(END | {"usage": usage})[-1].usage == told
    assert read(END, {"choices": [], "usage": usage})[-1].usage == told
    assert read(END)[-1].usage is None


def test_the_last_delta_waits_for_the_usage_until_the_end() -> None:
    reader = ChunkReader()
    assert reader.read(END) is None
    assert reader.finished
    assert reader.take_last(ended=False) is None
    assert reader.take_last(ended=True) == Delta(finish="stop")


def test_text_that_comes_with_the_finish_reason_is_kept() -> None:
    assert read(chat({"content": "bye"}, finish_reason="length"))[-1] == Delta("bye", finish="length")


def test_a_stop_string_is_told_and_a_stop_id_is_not() -> None:
    assert read(chat({}, finish_reason="stop", stop_reason="###"))[-1].stop == "###"
    assert read(chat({}, finish_reason="stop", stop_reason=151645))[-1].stop is None
    assert read(chat({}, finish_reason="stop", matched_stop="###"))[-1].stop == "###"


def test_ids_come_beside_the_text() -> None:
    completion = {"choices": [{"index": 0, "text": "", "token_ids": [258]}]}
    assert read(completion)[0] == Delta(ids=(258,))


def test_logprobs_of_a_completion_have_the_ids_that_are_known() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}], "text_offset": [0]}
    entry = read({"choices": [{"text": "a", "token_ids": [97], "logprobs": logprobs}]})[0].logprobs[0]
    assert (entry.id, entry.text, entry.logprob) == (97, "a", -0.5)
    assert entry.top == ((NO_ID, "a", -0.5), (NO_ID, "b", -1.0))


def test_logprobs_of_a_chat_are_named_by_text() -> None:
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.0}]}]
    entry = read(chat({"content": "a"}, logprobs={"content": content}))[0].logprobs[0]
    assert (entry.id, entry.text, entry.top) == (NO_ID, "a", ((NO_ID, "b", -1.0),))


def test_chunks_that_say_nothing_are_no_deltas() -> None:
    assert read(chat({"role": "assistant", "content": ""}), {"choices": []}, {"id": "x"}) == []


def test_an_unknown_finish_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="abort"):
        ChunkReader().read(chat({}, finish_reason="abort"))


def test_what_comes_behind_the_end_is_neither_lost_nor_told_before_it() -> None:
    first = chat({"content": "one"}, finish_reason="stop")
    twice = [first, chat({"content": " two"}), chat({"content": " three"}, finish_reason="length")]
    assert read(*twice) == [Delta("one two three", finish="stop")]
    assert read(first, END) == [Delta("one", finish="stop")]


@pytest.mark.parametrize(
    ("usage", "read_as"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2}, Usage(5, 2)),
        ({"prompt_tokens": 5, "completion_tokens": 2.0}, Usage(5, 2)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(5, 0, 4)),
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}, Usage(5, 0)),  # more than there are
        ({"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": -1}}, Usage(5, 0)),
        ({"prompt_tokens": 5, "prompt_tokens_details": [1]}, Usage(5, 0)),
        ({"prompt_tokens": -5, "completion_tokens": 2}, None),
        ({"prompt_tokens": 5, "completion_tokens": 1e300}, None),
        ({"prompt_tokens": "5"}, None),
        ({"prompt_tokens": True}, None),
        ([], None),
        ("5", None),
    ],
)
def test_usage_that_is_nonsense_is_none_and_the_answer_stands(usage: Any, read_as: Usage | None) -> None:
    assert read(chat({"content": "yes"}), END, {"choices": [], "usage": usage}) == [
        Delta("yes"),
        Delta(finish="stop", usage=read_as),
    ]


@pytest.mark.parametrize(
    "call",
    [{"index": 1e300}, {"index": -1}, {"index": 1 << 40}, {"index": "0"}, {"id": 5}, {"function": {"name": ["f"]}}],
)
def test_a_tool_call_that_is_none_breaks_the_protocol(call: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tool call|text"):
        read(chat({"tool_calls": [call]}))
