"""OpenAI-compatible endpoints: dialects, what is refused rather than dropped, what is learnt from a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engines.contract import ChatPrompt, GenerateRequest, Sampling, Unsupported
from engines.remote.dialects import (
    LLAMACPP_CHAT,
    LM_STUDIO,
    OLLAMA,
    OPENAI,
    SGLANG_CHAT,
    Dialect,
    recognise,
)
from engines.remote.http import Upstream
from engines.remote.openai import OpenAiEngine
from tests.contracts.live import LiveServer

pytestmark = pytest.mark.anyio
STREAM = b"""data: {"choices": [{"delta": {"role": "assistant"}}]}

data: {"choices": [{"delta": {"content": "ok"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}

data: [DONE]

"""


class Endpoint:
    """Answers every chat with STREAM unless `refuse` has something to say; keeps what it was asked."""

    def __init__(
        self, owned_by: str = "system", refuse: Callable[[dict[str, Any]], str | None] = lambda body: None
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refuse = refuse
        card = {"id": "m", "object": "model", "owned_by": owned_by, "context_length": 5000}

        async def chat(request: Request) -> Response:
            body = orjson.loads(await request.body())
            self.asked.append(body)
            if (complaint := self.refuse(body)) is not None:
                return JSONResponse({"error": {"message": complaint}}, 400)
            return Response(STREAM, media_type="text/event-stream")

        async def models(request: Request) -> Response:
            return JSONResponse({"object": "list", "data": [card]})

        async def props(request: Request) -> Response:
            return JSONResponse({"default_generation_settings": {"n_ctx": 4096}, "total_slots": 1})

        async def tokenize(request: Request) -> Response:
            assert orjson.loads(await request.body())["parse_special"] is True
            return JSONResponse({"tokens": [1, 2]})

        async def metrics(request: Request) -> Response:
            return PlainTextResponse("llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n")

        routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/v1/models", models)]
        if owned_by == "llamacpp":
            routes += [
                Route("/props", props),
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/metrics", metrics),
            ]
        self.app = Starlette(routes=routes)


def ask(prompt: ChatPrompt | None = None, **sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", "m", prompt or ChatPrompt([{"role": "user", "content": "hi"}]), Sampling(7, **sampling))


async def say(engine: OpenAiEngine, request: GenerateRequest) -> str:
    return "".join([delta.text async for delta in engine.generate(request)])


async def run(endpoint: Endpoint, request: GenerateRequest, dialect: Dialect | None = None) -> dict[str, Any]:
    with LiveServer(endpoint.app) as server:
        engine = OpenAiEngine(Upstream(server.url), dialect=dialect)
        try:
            assert await say(engine, request) == "ok"
        finally:
            await engine.aclose()
    return endpoint.asked[-1]


@pytest.mark.parametrize(
    ("owner", "dialect"),
    [("sglang", SGLANG_CHAT), ("llamacpp", LLAMACPP_CHAT), ("organization_owner", LM_STUDIO), ("library", OLLAMA),
     ("system", OPENAI), (None, OPENAI)],
)  # fmt: skip
def test_a_server_is_recognised_by_who_owns_its_models(owner: str | None, dialect: Dialect) -> None:
    assert recognise([{"id": "m", "owned_by": owner}]) is dialect


async def test_an_unknown_endpoint_gets_openai_fields_only() -> None:
    body = await run(Endpoint(), ask(seed=1, presence_penalty=0.5, stop_token_ids=(2,)))
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 1.0, "seed": 1,
        "presence_penalty": 0.5, "max_tokens": 7, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize("field", ["min_p", "top_k", "repetition_penalty", "ignore_eos"])
async def test_what_an_endpoint_is_not_known_to_honour_is_unsupported(field: str) -> None:
    endpoint = Endpoint()
    with pytest.raises(Unsupported) as caught:
        await run(endpoint, ask(**{field: True if field == "ignore_eos" else 2}))
    assert caught.value.param == field
    assert not endpoint.asked


@pytest.mark.parametrize(
    ("dialect", "sampling", "expected"),
    [
        (
            SGLANG_CHAT,
            {"min_p": 0.2, "stop_token_ids": (3,)},
            {"min_p": 0.2, "stop_token_ids": [3], "top_k": 0, "top_p": 1.0},
        ),
        (LLAMACPP_CHAT, {"repetition_penalty": 1.3}, {"repeat_penalty": 1.3, "top_k": 0, "min_p": 0.0}),
        (LM_STUDIO, {"top_k": 5}, {"top_k": 5, "repeat_penalty": 1.0}),
        (OLLAMA, {"top_p": 0.5}, {"top_p": 0.5}),
    ],
)
async def test_a_dialect_gets_its_own_names_and_explicit_values(
    dialect: Dialect, sampling: dict[str, Any], expected: dict[str, Any]
) -> None:
    body = await run(Endpoint(), ask(**sampling), dialect)
    assert {name: body.get(name) for name in expected} == expected


async def test_template_options_go_only_where_they_are_known() -> None:
    prompt = ChatPrompt([{"role": "user", "content": "hi"}], template_options={"enable_thinking": False})
    with pytest.raises(Unsupported):
        await run(Endpoint(), ask(prompt))
    assert (await run(Endpoint(), ask(prompt), SGLANG_CHAT))["chat_template_kwargs"] == {"enable_thinking": False}


async def test_tools_and_format_are_passed_on() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    prompt = ChatPrompt([{"role": "user", "content": "hi"}], tools, "required", False, {"type": "json_object"})
    body = await run(Endpoint(), ask(prompt))
    assert (body["tools"], body["tool_choice"], body["parallel_tool_calls"]) == (tools, "required", False)
    assert body["response_format"] == {"type": "json_object"}


async def test_it_learns_max_completion_tokens_and_to_leave_out_stream_options() -> None:
    def refuse(body: dict[str, Any]) -> str | None:
        if "max_tokens" in body:
            return "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        return "stream_options: extra inputs are not permitted" if "stream_options" in body else None

    endpoint = Endpoint(refuse=refuse)
    with LiveServer(endpoint.app) as server:
        engine = OpenAiEngine(Upstream(server.url))
        assert await say(engine, ask()) == "ok"
        assert await say(engine, ask()) == "ok"
        await engine.aclose()
    assert len(endpoint.asked) == 4
    assert endpoint.asked[-1]["max_completion_tokens"] == 7


async def test_llamacpp_tells_its_served_window_its_load_and_its_tokens() -> None:
    with LiveServer(Endpoint("llamacpp").app) as server:
        engine = OpenAiEngine(Upstream(server.url))
        found = await engine.capabilities()
        assert (found.kind, found.window, found.models) == ("llamacpp", 4096, ("m",))
        load = await engine.load()
        assert (load.running, load.waiting) == (2, 1)
        assert await engine.tokenize("x", model="m") == [1, 2]
        await engine.aclose()


async def test_other_endpoints_say_what_cannot_be_seen() -> None:
    with LiveServer(Endpoint().app) as server:
        engine = OpenAiEngine(Upstream(server.url))
        found = await engine.capabilities()
        assert (found.kind, found.window) == ("openai", 5000)
        assert {"load", "tokenizer", "epoch", "cached_tokens"} <= set(found.unseen)
        assert (await engine.load()).running == 0
        assert await engine.tokenize("x", model="m") is None
        await engine.aclose()
