"""An engine of the contract behind the wire of docs/engine-wire.md, over Starlette."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engines.contract import Delta, EngineError, GenerateRequest, IdsPrompt
from engines.echo import ECHO_MODEL_DIR, EchoEngine
from engines.echo_tokens import ID_BYTES, decode
from engines.local import wire
from engines.local.refusal import Refusal, refusal
from tests.contracts.live import first_delta

VOCAB = 259
GENERATE = "/turnkeep/v1/generate"


def create_app(engine: EchoEngine) -> Starlette:
    async def generate(request: Request) -> Response:
        try:
            asked = wire.decode_generate(await request.body(), VOCAB)
            deltas = cast(AsyncGenerator[Delta, None], engine.generate(_to_contract(asked)))
            first = await first_delta(request, deltas)
        except Refusal as error:
            return _refused(error)
        except EngineError as error:
            return _refused(refusal(error))
        return StreamingResponse(_events(first, deltas), media_type="text/event-stream")

    async def capabilities(request: Request) -> Response:
        found = asdict(await engine.capabilities())
        return JSONResponse({k: sorted(v) if isinstance(v, frozenset) else v for k, v in found.items()})

    async def health(request: Request) -> Response:
        load = await engine.load()
        pool = {"total": load.kv_blocks_total, "free": 0, "cached": load.kv_blocks_cached, "used": load.kv_blocks_used}
        return JSONResponse(
            {"status": "ok", "load": {"running": load.running, "waiting": load.waiting}, "pool": pool, "pool_ok": True}
        )

    async def tokenize(request: Request) -> Response:
        tokens = await engine.tokenize((await request.json())["prompt"], model="")
        return JSONResponse({"tokens": tokens, "count": len(tokens or []), "max_model_len": 0})

    async def detokenize(request: Request) -> Response:
        return JSONResponse({"prompt": decode((await request.json())["tokens"])})

    async def file(request: Request) -> Response:
        path = ECHO_MODEL_DIR / request.path_params["name"]
        if not path.is_file():
            return _refused(Refusal("not_found", "the model has no such file"))
        return Response(path.read_bytes())

    async def forget(request: Request) -> Response:
        return JSONResponse({"blocks_freed": engine.paths.forget(request.path_params["session"])})

    return Starlette(
        routes=[
            Route(GENERATE, generate, methods=["POST"]),
            Route("/turnkeep/v1/capabilities", capabilities),
            Route("/turnkeep/v1/tokenizer/{name}", file),
            Route("/turnkeep/v1/sessions/{session:path}", forget, methods=["DELETE"]),
            Route("/health", health),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
        ]
    )


def _to_contract(asked: wire.WireRequest) -> GenerateRequest:
    async def whole() -> bytes:
        if asked.base is not None:
            raise Refusal("unknown_base", "the base is no mark of the session")
        return asked.delta

    tokens = len(asked.delta) // ID_BYTES + (asked.base.length if asked.base else 0)
    prompt = IdsPrompt(asked.delta, tokens, whole, asked.session, asked.base)
    return GenerateRequest(asked.request_id, asked.model, prompt, asked.sampling, asked.salt, asked.priority)


async def _events(first: Delta, deltas: AsyncGenerator[Delta, None]) -> AsyncIterator[bytes]:
    def line(data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"

    def event(delta: Delta) -> bytes:
        return line(
            wire.delta_event(
                delta.ids, delta.text, delta.logprobs, finish=delta.finish, stop=delta.stop, usage=delta.usage
            ).data
        )

    async with aclosing(deltas):
        yield line(wire.started_event(0, 0, 0.0).data)
        yield event(first)
        try:
            async for delta in deltas:
                yield event(delta)
        except EngineError as error:
            yield line(wire.error_event(refusal(error)).data)
        yield line(b"[DONE]")


def _refused(error: Refusal) -> Response:
    headers: dict[str, Any] = {"Retry-After": "1"} if error.status == 503 else {}
    return Response(orjson.dumps({"error": error.fields()}), error.status, headers, "application/json")
