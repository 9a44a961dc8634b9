"""A server that speaks as llama.cpp's does, over EchoEngine. Shapes and errors are those that build 11549 sends:

/completion with token arrays, one event a token, but of a character of several tokens only the last one's id; a last
event with `stop_type`, `timings` and no `[DONE]`; any model's name answered; a prompt over the slot's context refused
with `exceed_context_size_error`; 501 for what it was not started with; a full server lets requests wait (503 here).
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
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
from engines.echo_tokens import decode, encode, pack
from tests.contracts import openai_app
from tests.contracts.live import first_delta

COMPLETION, CHAT = "/completion", "/v1/chat/completions"
SLOTS = 4


def create_app(engine: EchoEngine, *, asked: list[dict[str, Any]] | None = None, metrics: bool = True) -> Starlette:
    """`asked`: filled with the body of each request to /completion. It knows no salt: the slot stands for one."""

    async def complete(request: Request) -> Response:
        body = orjson.loads(await request.body())
        if asked is not None:
            asked.append(body)
        if not body["prompt"]:
            return error(400, '"prompt" must not be empty')
        if body["n_predict"] == 0:  # one token all the same, as the real one
            body["n_predict"] = 1
        deltas = cast(AsyncGenerator[Delta, None], engine.generate(_to_contract(body)))
        try:
            first = await first_delta(request, deltas)
        except EngineError as failed:
            return _refused(failed, len(body["prompt"]))
        if not body.get("stream"):
            async with aclosing(deltas):
                return JSONResponse({"content": first.text, "stop": True, "id_slot": body.get("id_slot", 0)})
        return StreamingResponse(_stream(first, deltas, body), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        window = (await engine.capabilities()).window
        card = {"id": "echo", "aliases": ["echo"], "object": "model", "owned_by": "llamacpp", "created": 1}
        meta = {"n_ctx": window, "n_ctx_train": 1 << 20}
        return JSONResponse({"object": "list", "models": [{"name": "echo"}], "data": [card | {"meta": meta}]})

    async def props(request: Request) -> Response:
        found = await engine.capabilities()
        settings = {"id": 0, "n_ctx": found.window, "params": {"temperature": 0.8}}
        more = {"total_slots": SLOTS, "modalities": {"vision": False, "audio": False}, "build_info": "b11549-x"}
        caps = {"supports_tools": False, "supports_system_role": True}
        marker = {"media_marker": f"<__media_{found.epoch}__>", "chat_template_caps": caps}
        return JSONResponse({"default_generation_settings": settings, **more, **marker})

    async def slots(request: Request) -> Response:
        running = (await engine.load()).running
        return JSONResponse([{"id": n, "n_ctx": 1024, "is_processing": n < running} for n in range(SLOTS)])

    async def erase(request: Request) -> Response:
        return error(501, "This server does not support slots action. Start it with `--slot-save-path`")

    async def scrape(request: Request) -> Response:
        if not metrics:
            return error(501, "This server does not support metrics endpoint. Start it with `--metrics`")
        running = (await engine.load()).running
        return PlainTextResponse(f"llamacpp:requests_processing {running}\nllamacpp:requests_deferred 0\n")

    async def tokenize(request: Request) -> Response:
        body = await request.json()
        ids = encode(body["content"]) if body["parse_special"] else list(body["content"].encode())
        return JSONResponse({"tokens": ids})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def absent(request: Request) -> Response:
        return error(501, "This server does not support embeddings. Start it with `--embeddings`")

    async def completions(request: Request) -> Response:
        return error(400, '"prompt" is missing')

    chat = next(route for route in openai_app.create_app(engine).routes if getattr(route, "path", "") == CHAT)
    return Starlette(
        routes=[
            Route(COMPLETION, complete, methods=["POST"]),
            chat,
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", absent, methods=["POST"]),
            Route("/v1/rerank", absent, methods=["POST"]),
            Route("/v1/models", models),
            Route("/props", props),
            Route("/slots", slots),
            Route("/slots/{id}", erase, methods=["POST"]),
            Route("/metrics", scrape),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/health", health),
        ]
    )


def _to_contract(body: dict[str, Any]) -> GenerateRequest:
    ids = pack(body["prompt"])

    async def whole() -> bytes:
        return ids

    salt = f"slot-{body.get('id_slot', -1)}" if body.get("cache_prompt", True) else f"fresh-{id(body)}"
    probs = body.get("n_probs") or None
    sampling = Sampling(body["n_predict"], ignore_eos=body.get("ignore_eos", False), logprobs=probs)
    return GenerateRequest("r", "echo", IdsPrompt(ids, len(body["prompt"]), whole), sampling, salt)


async def _stream(first: Delta, deltas: AsyncGenerator[Delta, None], body: dict[str, Any]) -> AsyncIterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    predicted = 0
    usage: dict[str, Any] = {}

    def event(fields: dict[str, Any]) -> bytes:
        frame = {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": -1, "tokens_predicted": predicted}
        return b"data: " + orjson.dumps(frame | {"tokens_evaluated": len(body["prompt"]), **fields}) + b"\n\n"

    def told(delta: Delta) -> bytes:
        """A line for each token, but for those that only begin a character."""
        nonlocal predicted
        lines = []
        for place, id in enumerate(delta.ids):
            predicted += 1
            text = "" if id > 255 else decoder.decode(bytes([id]))
            if id < 256 and not text:
                continue
            fields: dict[str, Any] = {"content": text, "tokens": [id]}
            if delta.logprobs:
                entry = delta.logprobs[place]
                top = [{"id": t, "token": w, "bytes": [], "logprob": value} for t, w, value in entry.top]
                said = {"id": id, "token": decode([id]), "bytes": [id], "logprob": entry.logprob, "top_logprobs": top}
                fields["completion_probabilities"] = [said]
            if body.get("timings_per_token"):
                fields["timings"] = {"cache_n": 0, "prompt_n": len(body["prompt"]), "predicted_n": predicted}
            lines.append(event(fields))
        return b"".join(lines)

    progress = {"total": len(body["prompt"]), "cache": 0, "processed": len(body["prompt"]), "time_ms": 1}
    async with aclosing(deltas):
        if body.get("return_progress"):
            yield event({"tokens": [0], "prompt_progress": progress})
        last = first
        if line := told(first):
            yield line
        try:
            async for last in deltas:
                if line := told(last):
                    yield line
        except EngineError as failed:
            yield b"data: " + orjson.dumps(_complaint(500, str(failed), "server_error")) + b"\n\n"
            return
    assert last.usage is not None
    cached = last.usage.cached_tokens or 0
    usage = {"timings": {"cache_n": cached, "prompt_n": last.usage.prompt_tokens - cached, "predicted_ms": 1.0}}
    kind = "limit" if last.finish == "length" else "eos"
    settings = {"generation_settings": {"n_ctx": 1024}, "model": "echo", "truncated": False, "stopping_word": ""}
    yield event({"stop": True, "id_slot": body.get("id_slot", 0), "stop_type": kind, **settings, **usage})


def _refused(failed: EngineError, prompt_tokens: int) -> Response:
    match failed:
        case ContextOverflow():
            limit = failed.limit or 0
            numbers = f"({failed.requested} tokens) exceeds the available context size ({limit} tokens)"
            said = _complaint(400, f"request {numbers}, try increasing it", "exceed_context_size_error")
            said["error"] |= {"n_prompt_tokens": failed.requested, "n_ctx": limit}
            return JSONResponse(said, 400)
        case RequestRefused():
            return error(400, str(failed))
        case EngineOverloaded():
            return JSONResponse(_complaint(503, "no slot is available", "unavailable_error"), 503, {"Retry-After": "1"})
        case _:
            return error(500, str(failed))


def error(status: int, message: str) -> Response:
    kinds = {400: "invalid_request_error", 501: "not_supported_error"}
    return JSONResponse(_complaint(status, message, kinds.get(status, "server_error")), status)


def _complaint(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "type": kind}}
