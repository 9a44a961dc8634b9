"""A server that speaks as vLLM does, over EchoEngine. Shapes and errors are those of vLLM's published sources:

chunks of /v1/completions with `token_ids` and `stop_reason`, usage in a chunk of its own with empty `choices`,
`prompt_tokens_details` only when enabled, errors as `{"error": {"message", "type", "param", "code": int}}`, an error in
mid-stream as a data line followed by `[DONE]`, priority refused unless the scheduler knows it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from engines.contract import (
    ChatPrompt,
    ContextOverflow,
    Delta,
    EngineError,
    EngineOverloaded,
    GenerateRequest,
    IdsPrompt,
    RequestRefused,
    Sampling,
)
from engines.echo import EchoEngine
from engines.echo_tokens import pack
from tests.contracts.live import first_delta

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIELDS = (
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ),
    *("seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("logprobs", "top_logprobs", "ignore_eos", "return_token_ids", "skip_special_tokens", "cache_salt", "priority"),
    *("response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
    "chat_template_kwargs",
)
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="echo"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="echo"}} 0.0
vllm:{usage}{{engine="0",model_name="echo"}} 0.25
vllm:cache_config_info{{block_size="16",cache_dtype="auto",num_gpu_blocks="400",enable_prefix_caching="True"}} 1.0
process_start_time_seconds 1.795987e+09
"""


def create_app(engine: EchoEngine, *, prompt_details: bool = True, priorities: bool = False) -> Starlette:
    async def complete(request: Request) -> Response:
        body = orjson.loads(await request.body())
        if unknown := body.keys() - set(FIELDS):
            return _error(400, f"a real server would pass over {sorted(unknown)}")
        if body.get("priority") and not priorities:
            return _error(400, "Got priority but Priority scheduling is not enabled.")
        if body["top_k"] < -1 or body["top_k"] == 0:
            return _error(400, "top_k must be -1 (disable), or at least 1")
        chat = request.url.path == CHAT
        if chat and body.get("tool_choice") == "auto":
            return _error(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        deltas = cast(AsyncGenerator[Delta, None], engine.generate(_to_contract(body, chat)))
        try:
            first = await first_delta(request, deltas)
        except EngineError as error:
            return _refused(error)
        stream = _stream(first, deltas, body, chat=chat, prompt_details=prompt_details)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def models(request: Request) -> Response:
        window = (await engine.capabilities()).window
        card = {"id": "echo", "object": "model", "owned_by": "vllm", "root": "echo", "max_model_len": window}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(request: Request) -> Response:
        tokens = await engine.tokenize((await request.json())["prompt"], model="echo")
        return JSONResponse({"count": len(tokens or []), "max_model_len": 100, "tokens": tokens})

    async def metrics(request: Request) -> Response:
        running = (await engine.load()).running
        return PlainTextResponse(METRICS.format(running=running, usage="kv_cache_usage_perc"))

    async def openapi(request: Request) -> Response:
        properties: dict[str, Any] = {name: {} for name in FIELDS}
        paths: dict[str, Any] = {path: {} for path in (COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize")}
        return JSONResponse(
            {"components": {"schemas": {"CompletionRequest": {"properties": properties}}}, "paths": paths}
        )

    async def health(request: Request) -> Response:
        return Response(status_code=200)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": "0.19.1"})

    return Starlette(
        routes=[
            Route(COMPLETIONS, complete, methods=["POST"]),
            Route(CHAT, complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            Route("/health", health),
            Route("/version", version),
        ]
    )


def _to_contract(body: dict[str, Any], chat: bool) -> GenerateRequest:
    grammar_asked = body.get("structured_outputs") or body.get("response_format")
    prompt: ChatPrompt | IdsPrompt
    if chat:
        prompt = ChatPrompt(body["messages"], response_format=grammar_asked)
    else:
        ids = pack(body["prompt"])

        async def whole() -> bytes:
            return ids

        prompt = IdsPrompt(ids, len(body["prompt"]), whole)
    sampling = Sampling(
        body["max_tokens"],
        seed=body.get("seed"),
        stop=tuple(body.get("stop") or ()),
        stop_token_ids=tuple(body.get("stop_token_ids") or ()),
        ignore_eos=body["ignore_eos"],
        logprobs=body.get("top_logprobs") if chat else body.get("logprobs"),
    )
    return GenerateRequest("r", body["model"], prompt, sampling, body.get("cache_salt", ""))


async def _stream(
    first: Delta, deltas: AsyncGenerator[Delta, None], body: dict[str, Any], *, chat: bool, prompt_details: bool
) -> AsyncIterator[bytes]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    frame = {"id": "cmpl-1", "object": kind, "created": 1795987212, "model": "echo"}

    def line(choices: list[Any], **more: Any) -> bytes:
        return b"data: " + orjson.dumps(frame | {"choices": choices} | more) + b"\n\n"

    def choice(delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {"content": delta.text}} if chat else {"text": delta.text}
        said |= {"index": 0, "logprobs": _logprobs(delta, chat), "finish_reason": delta.finish}
        said["stop_reason"] = delta.stop
        return said | ({"token_ids": list(delta.ids)} if body.get("return_token_ids") else {})

    async with aclosing(deltas):
        if chat:
            yield line([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        last = first
        yield line([choice(first)])
        try:
            async for last in deltas:
                yield line([choice(last)])
            usage = last.usage
            if usage is not None and body["stream_options"]["include_usage"]:
                counts: dict[str, Any] = {
                    "prompt_tokens": usage.prompt_tokens,
                    "total_tokens": usage.prompt_tokens + usage.output_tokens,
                    "completion_tokens": usage.output_tokens,
                }
                if prompt_details:
                    counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
                yield line([], usage=counts)
        except EngineError as error:
            said = {"message": str(error), "type": "InternalServerError", "param": None, "code": 500}
            yield b"data: " + orjson.dumps({"error": said}) + b"\n\n"
        yield b"data: [DONE]\n\n"


def _logprobs(delta: Delta, chat: bool) -> dict[str, Any] | None:
    if not delta.logprobs:
        return None
    if chat:
        return {
            "content": [
                {
                    "token": entry.text,
                    "logprob": entry.logprob,
                    "bytes": list(entry.text.encode()),
                    "top_logprobs": [{"token": text, "logprob": value} for _, text, value in entry.top],
                }
                for entry in delta.logprobs
            ]
        }
    return {
        "text_offset": [0] * len(delta.logprobs),
        "token_logprobs": [entry.logprob for entry in delta.logprobs],
        "tokens": [entry.text for entry in delta.logprobs],
        "top_logprobs": [{text: value for _, text, value in entry.top} for entry in delta.logprobs],
    }


def _refused(error: EngineError) -> Response:
    match error:
        case ContextOverflow():
            asked = error.requested or 0
            return _error(
                400,
                f"This model's maximum context length is {error.limit} tokens. However, you requested 0 output tokens "
                f"and your prompt contains at least {asked} input tokens, for a total of at least {asked} tokens. "
                "Please reduce the length of the input prompt or the number of requested output tokens.",
            )
        case RequestRefused(code="model_not_found"):
            return _error(404, "The model `x` does not exist.", "NotFoundError")
        case RequestRefused():
            return _error(400, str(error), param=error.param)
        case EngineOverloaded():
            return _error(503, "The server is overloaded", "ServiceUnavailable", headers={"Retry-After": "1"})
        case _:
            return _error(500, str(error), "InternalServerError")


def _error(
    status: int,
    message: str,
    kind: str = "BadRequestError",
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    said = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": said}, status, headers)
