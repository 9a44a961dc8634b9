"""`/v1/messages` by the official `anthropic` client: answers, streams, tools, counts, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, AsyncAnthropic

from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.api.test_chat_mode import Recorder, in_front_of
from tests.gateway.api.test_response_tools import CALLING
from tests.gateway.served import Served, served

USER: Any = {"role": "user", "content": "hello there"}
TOOL: Any = {"name": "look_up", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("messages"), auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def key(gateway: Served) -> str:
    return gateway.key()["authorization"].removeprefix("Bearer ")


@pytest.fixture
def client(gateway: Served, key: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=gateway.url, api_key=key, max_retries=0) as made:
        yield made


def test_a_resent_history_is_recognised_and_counted(client: Anthropic) -> None:
    first = client.messages.create(model="echo", max_tokens=64, messages=[USER], system="Be brief.")
    assert (first.content[0].type, first.stop_reason) == ("text", "end_turn")
    assert first.content[0].text == "hello there"
    history = [
        USER,
        {"role": "assistant", "content": [first.content[0].to_dict()]},
        {"role": "user", "content": "more"},
    ]
    counted = client.messages.count_tokens(model="echo", messages=history, system="Be brief.")
    second = client.messages.create(model="echo", max_tokens=64, messages=history, system="Be brief.")
    usage = second.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    whole = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0) + first.usage.output_tokens
    assert (usage.cache_read_input_tokens or 0) >= whole - 1


def test_a_stream_is_put_together_to_the_same_message(client: Anthropic) -> None:
    with client.messages.stream(model="echo", max_tokens=64, messages=[USER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert (final.content[0].type, final.stop_reason) == ("text", "end_turn")
    assert final.content[0].text == "hello there"
    assert final.usage.output_tokens > 0


def test_a_cut_answer_says_so_and_a_key_may_come_in_its_own_header(gateway: Served, key: str) -> None:
    body = {"model": "echo", "max_tokens": 3, "messages": [USER]}
    answer = gateway.client.post("/v1/messages", json=body, headers={"x-api-key": key})
    assert answer.json()["stop_reason"] == "max_tokens"
    refused(gateway.client.post("/v1/messages", json=body, headers={"x-api-key": "tk-none"}), 401)


@pytest.mark.anyio
async def test_tool_calls_and_thinking_keep_their_pairs(tmp_path: Path) -> None:
    server = Recorder(*CALLING, finish="tool_calls")
    async with (
        in_front_of(server.app, tmp_path, tokenizers={}) as live,
        AsyncAnthropic(base_url=live.url, api_key="tk-none", max_retries=0) as client,
    ):
        common: dict[str, Any] = {"model": "echo", "max_tokens": 64, "tools": [TOOL]}
        first = await client.messages.create(messages=[USER], tool_choice={"type": "any"}, **common)
        assert [block.type for block in first.content] == ["thinking", "tool_use", "tool_use"]
        assert first.stop_reason == "tool_use"
        assert server.bodies[0]["tool_choice"] == "required"
        async with client.messages.stream(messages=[USER], **common) as stream:
            final = await stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in first.content]
        server.deltas, server.finish = ({"content": "It is 1."},), "stop"
        results = [{"type": "tool_result", "tool_use_id": id, "content": id} for id in ("c1", "c2")]
        history: Any = [
            USER,
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
        ]
        second = await client.messages.create(messages=history, **common)
        assert second.content[0].type == "text"
        sent = server.bodies[-1]["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "user"]
        assert [call["id"] for call in sent[1]["tool_calls"]] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(gateway: Served, key: str, more: dict[str, Any], param: str) -> None:
    body = {"model": "echo", "max_tokens": 16, "messages": [USER], **more}
    with nothing_saved(gateway):
        answer = gateway.client.post("/v1/messages", json=body, headers={"x-api-key": key})
        assert refused(answer, 400)["param"] == param
