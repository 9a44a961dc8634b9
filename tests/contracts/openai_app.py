"""A server with OpenAI's chat endpoint and nothing else, over EchoEngine: no ids, no probes but the list of models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engines.contract import (
    ChatPrompt,
    ContextOverflow,
    Delta,
    EngineError,
    EngineOverloaded,
    GenerateRequest,
    RequestRefused,
    Sampling,
)
from engines.echo import EchoEngine
from tests.contracts.live import first_delta

CHAT = "/v1/chat/completions"


def create_app(engine: EchoEngine) -> Starlette:
    async def complete(request: Request) -> Response:
        body = orjson.loads(await request.body())
        sampling = Sampling(
            body["max_tokens"],
            seed=body.get("seed"),
            stop=tuple(body.get("stop") or ()),
            logprobs=body.get("top_logprobs"),
        )
        prompt = ChatPrompt(body["messages"], response_format=body.get("response_format"))
        deltas = cast(
            AsyncGenerator[Delta, None], engine.generate(GenerateRequest("r", body["model"], prompt, sampling))
        )
        try:
            first = await first_delta(request, deltas)
        except EngineError as error:
            return _refused(error)
        return StreamingResponse(_stream(first, deltas), media_type="text/event-stream; charset=utf-8")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "echo", "object": "model", "owned_by": "me"}]})

    return Starlette(routes=[Route(CHAT, complete, methods=["POST"]), Route("/v1/models", models)])


async def _stream(first: Delta, deltas: AsyncGenerator[Delta, None]) -> AsyncIterator[bytes]:
    def line(delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} | more
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "echo", "usage": None}
        return b"data: " + orjson.dumps(chunk | {"choices": [choice]}) + b"\n\n"

    def said(delta: Delta) -> bytes:
        content = [
            {
                "token": entry.text,
                "logprob": entry.logprob,
                "bytes": None,
                "top_logprobs": [{"token": text, "logprob": value, "bytes": None} for _, text, value in entry.top],
            }
            for entry in delta.logprobs
        ]
        return line({"content": delta.text}, logprobs={"content": content, "refusal": None} if content else None)

    async with aclosing(deltas):
        yield line({"role": "assistant", "content": "", "refusal": None})
        last = first
        yield said(first)
        try:
            async for last in deltas:
                yield said(last)
        except EngineError as error:
            yield b"data: " + orjson.dumps({"error": {"message": str(error), "type": "server_error"}}) + b"\n\n"
            return
        yield line({}, finish_reason=last.finish)
        if last.usage is not None:
            counts = {"prompt_tokens": last.usage.prompt_tokens, "completion_tokens": last.usage.output_tokens}
            yield b"data: " + orjson.dumps({"id": "chatcmpl-1", "choices": [], "usage": counts}) + b"\n\n"
        yield b"data: [DONE]\n\n"


def _refused(error: EngineError) -> Response:
    def answer(status: int, message: str, code: str | None, param: str | None = None, **headers: str) -> Response:
        said = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        return JSONResponse({"error": said}, status, headers)

    match error:
        case ContextOverflow():
            message = (
                f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
                f"{error.requested} tokens. Please reduce the length of the messages."
            )
            return answer(400, message, "context_length_exceeded", "messages")
        case RequestRefused(code="model_not_found"):
            return answer(404, "The model `x` does not exist or you do not have access to it.", "model_not_found")
        case RequestRefused():
            return answer(400, str(error), None, error.param)
        case EngineOverloaded():
            return answer(429, "Too many requests", "rate_limit_exceeded", **{"Retry-After": "1"})
        case _:
            return answer(500, "The server had an error while processing your request", None)
