"""A server that speaks as SGLang does, over EchoEngine. Shapes and errors are those of SGLang's published sources:

/generate with `input_ids`, each event the whole answer so far (or, `incremental`, what was added), `meta_info` with
`finish_reason` {"type", "matched"} and the counts; a refusal while streaming is an error event without a code inside a
200, a full queue an abort with a status; /v1/loads per data-parallel rank, /get_server_info with its arguments.
"""

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
from tests.contracts import openai_app
from tests.contracts.live import first_delta

GENERATE, CHAT = "/generate", "/v1/chat/completions"
SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop",
    "repetition_penalty", "ignore_eos", "skip_special_tokens", "stop_token_ids", "logit_bias", "sampling_seed",
    "json_schema", "regex", "ebnf",
}  # fmt: skip


def create_app(engine: EchoEngine, *, incremental: bool = False, salts: list[str] | None = None) -> Starlette:
    """`salts`: filled with the salt of each request to /generate."""

    async def generate(request: Request) -> Response:
        body = orjson.loads(await request.body())
        if salts is not None:
            salts.append(body.get("cache_salt", ""))
        if unknown := body["sampling_params"].keys() - SAMPLING:
            said = f"SamplingParams.__init__() got an unexpected keyword argument '{min(unknown)}'"
            return JSONResponse({"error": {"message": said}}, 400)
        deltas = cast(AsyncGenerator[Delta, None], engine.generate(_to_contract(body)))
        try:
            first = await first_delta(request, deltas)
        except ContextOverflow as error:
            limit = f"the model's context length ({error.limit} tokens)"
            said = f"The input ({error.requested} tokens) is longer than {limit}."
            return _events(data({"error": {"message": said}}))
        except RequestRefused as error:
            return _events(data({"error": {"message": str(error)}}))
        except EngineOverloaded:
            reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503, "err_type": None}
            return _events(data(_event("", [], {"finish_reason": reason})))
        except EngineError as error:
            return JSONResponse({"error": {"message": str(error)}}, 500)
        return StreamingResponse(_stream(first, deltas, body, incremental), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        window = (await engine.capabilities()).window
        card = {"id": "echo", "object": "model", "owned_by": "sglang", "root": "echo", "max_model_len": window}
        return JSONResponse({"object": "list", "data": [card | {"parent": None}]})

    async def server_info(request: Request) -> Response:
        window = (await engine.capabilities()).window
        found = {"model_path": "echo", "context_length": window, "page_size": 1, "max_running_requests": 64}
        more = {"tool_call_parser": None, "reasoning_parser": None, "disable_radix_cache": False, "version": "0.5.9"}
        return JSONResponse(found | more | {"incremental_streaming_output": incremental, "internal_states": [{}]})

    async def model_info(request: Request) -> Response:
        return JSONResponse({"model_path": "echo", "is_generation": True, "has_image_understanding": False})

    async def loads(request: Request) -> Response:
        running = (await engine.load()).running
        rank: dict[str, Any] = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": 0,
            "num_used_tokens": 100,
        }
        rank |= {"max_total_num_tokens": 400, "token_usage": 0.25, "cache_hit_rate": 0.0}
        return JSONResponse({"timestamp": "2026-11-01T00:00:00+00:00", "version": "0.5.9", "loads": [rank]})

    async def tokenize(request: Request) -> Response:
        tokens = await engine.tokenize((await request.json())["prompt"], model="echo")
        return JSONResponse({"tokens": tokens, "count": len(tokens or []), "max_model_len": 100})

    async def health(request: Request) -> Response:
        return Response(status_code=200)

    async def completions(request: Request) -> Response:
        return JSONResponse({"object": "error", "message": "prompt: Field required", "code": 400}, 400)

    chat = next(route for route in openai_app.create_app(engine).routes if getattr(route, "path", "") == CHAT)
    return Starlette(
        routes=[
            Route(GENERATE, generate, methods=["POST"]),
            chat,
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/get_server_info", server_info),
            Route("/get_model_info", model_info),
            Route("/v1/loads", loads),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/health", health),
        ]
    )


def data(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _events(*lines: bytes) -> Response:
    return Response(b"".join(lines) + b"data: [DONE]\n\n", media_type="text/event-stream")


def _to_contract(body: dict[str, Any]) -> GenerateRequest:
    ids, sampling = pack(body["input_ids"]), body["sampling_params"]

    async def whole() -> bytes:
        return ids

    return GenerateRequest(
        "r",
        "echo",
        IdsPrompt(ids, len(body["input_ids"]), whole),
        Sampling(
            sampling["max_new_tokens"],
            seed=sampling.get("sampling_seed"),
            stop=tuple(sampling.get("stop") or ()),
            stop_token_ids=tuple(sampling.get("stop_token_ids") or ()),
            ignore_eos=sampling["ignore_eos"],
            logprobs=body.get("top_logprobs_num") if body.get("return_logprob") else None,
        ),
        body.get("cache_salt", ""),
    )


def _event(text: str, ids: list[int], meta: dict[str, Any]) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"id": "x", "completion_tokens": len(ids), **meta}}


async def _stream(
    first: Delta, deltas: AsyncGenerator[Delta, None], body: dict[str, Any], incremental: bool
) -> AsyncIterator[bytes]:
    text = ""
    ids: list[int] = []
    probs: list[list[Any]] = []
    tops: list[list[Any]] = []
    stops = body["sampling_params"].get("stop") or []

    def line(delta: Delta) -> bytes:
        nonlocal text
        text += delta.text
        ids.extend(delta.ids)
        probs.extend([[e.logprob, e.id, e.text] for e in delta.logprobs])
        tops.extend([[[value, token, word] for token, word, value in e.top] for e in delta.logprobs])
        meta: dict[str, Any] = {"finish_reason": None, "prompt_tokens": 0, "weight_version": "default"}
        meta |= {"completion_tokens": len(ids), "cached_tokens": 0, "e2e_latency": 0.1}
        if delta.usage is not None:
            meta |= {"prompt_tokens": delta.usage.prompt_tokens, "cached_tokens": delta.usage.cached_tokens}
            matched = delta.stop if delta.stop in stops else delta.ids[-1]
            length = {"type": "length", "length": len(ids)}
            meta["finish_reason"] = length if delta.finish == "length" else {"type": "stop", "matched": matched}
        if body.get("return_logprob"):
            added = len(delta.logprobs) if incremental else len(probs)
            meta["output_token_logprobs"] = probs[len(probs) - added :]
            meta["output_top_logprobs"] = tops[len(tops) - added :]
        told = (delta.text, list(delta.ids)) if incremental else (text, ids)
        return data({"text": told[0], "output_ids": told[1], "meta_info": {"id": "x", **meta}})

    async with aclosing(deltas):
        yield line(first)
        try:
            async for delta in deltas:
                yield line(delta)
        except EngineError as error:
            yield data({"error": {"message": str(error), "type": "InternalServerError", "code": 500}})
    yield b"data: [DONE]\n\n"
