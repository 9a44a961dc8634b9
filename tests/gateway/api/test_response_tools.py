"""Tool calls and reasoning through `/v1/responses`: pairs, bytes and streams, as OpenAI's own client reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.gateway.api.test_chat_mode import Recorder, in_front_of
from tests.gateway.live import Live

pytestmark = pytest.mark.anyio

TOOL: Any = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}, "strict": False}
ARGUMENTS = '{"a":  1,\n "ü": [ ]}'  # as the model spaces it
CALLING = (
    {"reasoning_content": "I must "},
    {"reasoning_content": "look."},
    {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[:7]}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[7:]}}]},
    {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]},
)


def client_of(live: Live) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{live.url}/v1", api_key="tk-none", max_retries=0)


async def test_calls_keep_their_pairs_and_bytes_over_responses(tmp_path: Path) -> None:
    server = Recorder(*CALLING, finish="tool_calls")
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live, client_of(live) as client:
        first = await client.responses.create(model="echo", input="look it up", tools=[TOOL], tool_choice="required")
        assert [item.type for item in first.output] == ["reasoning", "function_call", "function_call"]
        call = first.output[1]
        assert call.type == "function_call"
        assert (call.call_id, call.arguments) == ("c1", ARGUMENTS)
        assert server.bodies[0]["tools"][0]["function"]["name"] == "look_up"
        server.deltas, server.finish = ({"content": "It is 1."},), "stop"
        outputs: Any = [{"type": "function_call_output", "call_id": id, "output": f" {id}\n"} for id in ("c1", "c2")]
        second = await client.responses.create(model="echo", input=outputs, tools=[TOOL], previous_response_id=first.id)
        assert second.output_text == "It is 1."
        sent = server.bodies[-1]["messages"]
        assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool"]
        assert [c["function"]["arguments"] for c in sent[1]["tool_calls"]] == [ARGUMENTS, "{}"]
        assert [m["content"] for m in sent[2:]] == [" c1\n", " c2\n"]
        lonely: Any = [{"type": "function_call_output", "call_id": "c9", "output": "x"}]
        refused = await live.client.post(
            "/v1/responses", json={"model": "echo", "input": lonely, "previous_response_id": second.id}
        )
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "tool_output_unmatched")


async def test_what_a_client_keeps_itself_comes_back_as_it_went(tmp_path: Path) -> None:
    server = Recorder(*CALLING, finish="tool_calls")
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live, client_of(live) as client:
        question: Any = {"role": "user", "content": "look it up"}
        first = await client.responses.create(
            model="echo", input=[question], tools=[TOOL], store=False, include=["reasoning.encrypted_content"]
        )
        thought = first.output[0].to_dict()
        assert thought["encrypted_content"]
        del thought["content"]
        outputs: Any = [{"type": "function_call_output", "call_id": id, "output": id} for id in ("c1", "c2")]
        kept: Any = [question, thought, *(item.to_dict() for item in first.output[1:]), *outputs]
        server.deltas, server.finish = ({"content": "It is 1."},), "stop"
        second = await client.responses.create(model="echo", input=kept, tools=[TOOL], store=False)
        assert second.output_text == "It is 1."
        assert server.bodies[-1]["messages"][1]["reasoning_content"] == "I must look."
        assert [c["function"]["arguments"] for c in server.bodies[-1]["messages"][1]["tool_calls"]] == [ARGUMENTS, "{}"]


async def test_openais_client_puts_a_streamed_call_together(tmp_path: Path) -> None:
    server = Recorder(*CALLING, finish="tool_calls")
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live, client_of(live) as client:
        async with client.responses.stream(model="echo", input="look it up", tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == ["reasoning", "function_call", "function_call"]
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        order = ["response.reasoning_text.done", "response.function_call_arguments.done", "response.completed"]
        assert [kinds.index(kind) for kind in order] == sorted(kinds.index(kind) for kind in order)
        again = await client.responses.retrieve(final.id)
        assert [item.id for item in again.output] == [item.id for item in final.output]


async def test_only_the_allowed_tools_are_offered(tmp_path: Path) -> None:
    server = Recorder({"content": "no"})
    other: Any = {**TOOL, "name": "other"}
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live, client_of(live) as client:
        choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
        await client.responses.create(model="echo", input="x", tools=[TOOL, other], tool_choice=choice)
        assert [tool["function"]["name"] for tool in server.bodies[0]["tools"]] == ["other"]
