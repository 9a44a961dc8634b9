"""Engines to stand behind a gateway under measurement, each a process that prints its URL when it listens.

    python -m bench.upstreams echo   --model echo-paced --tokens-per-s 160
    python -m bench.upstreams openai --tokens-per-s 160

`echo` is EchoEngine behind the engine's own front, at the speed of a real model; `openai` speaks OpenAI's chat
completions for the peers and says as much, four tokens a chunk. A long answer of `openai` is paced, a short one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import socket
import time

import uvloop
from aiohttp import web

TOKENS_A_CHUNK = 4
PACED_FROM = 65  # max_tokens; shorter answers come at once
WORD = "ipsum dolor sit "  # cut to four bytes a chunk, as echo answers


async def serve_echo(model: str, tokens_per_s: float) -> None:
    import uvicorn

    from engines.echo import ECHO_MODEL_DIR, EchoEngine
    from engines.local.backend import ModelInfo
    from engines.local.in_process import InProcess
    from engines.local.server import create_app

    epoch = secrets.token_hex(8)
    engine = EchoEngine(model=model, epoch=epoch, tokens_per_s=tokens_per_s, chunk_tokens=TOKENS_A_CHUNK)
    info = ModelInfo(model, ECHO_MODEL_DIR, 131_072, 259, 32, "none", "none", epoch)
    app = create_app(InProcess(engine, info), clock=time.monotonic, now=time.time)
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_level="warning", timeout_keep_alive=75)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"ready http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])


def _chunk(text: str | None, finish: str | None) -> bytes:
    delta = {"role": "assistant", "content": text} if text is not None else {}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "echo", "choices": [choice]}
    return b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n"


def openai_app(tokens_per_s: float) -> web.Application:
    piece, last = _chunk(WORD[:TOKENS_A_CHUNK], None), _chunk(None, "stop")

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        tokens = int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        chunks = max(1, tokens // TOKENS_A_CHUNK)
        if not asked.get("stream"):
            message = {"role": "assistant", "content": (WORD * chunks)[: chunks * TOKENS_A_CHUNK]}
            usage = {"prompt_tokens": 2000, "completion_tokens": tokens, "total_tokens": 2000 + tokens}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "echo"}
            return web.json_response({**told, "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(chunks):
            await asyncio.sleep(TOKENS_A_CHUNK / tokens_per_s if tokens >= PACED_FROM else 0)
            await response.write(piece)
        await response.write(last + b"data: [DONE]\n\n")
        return response

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "echo", "object": "model", "owned_by": "bench"}]})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model_path": "echo", "served_model_name": "echo"})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/v1/models", models)
    for path in ("/health", "/health_generate", "/get_server_info", "/server_info", "/get_model_info", "/model_info"):
        app.router.add_get(path, health)
    return app


async def serve_openai(tokens_per_s: float) -> None:
    runner = web.AppRunner(openai_app(tokens_per_s), access_log=None, keepalive_timeout=75)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"ready http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("echo", "openai"))
    parser.add_argument("--model", default="echo-paced")
    parser.add_argument("--tokens-per-s", type=float, default=160.0, help="of each answer; four tokens are a chunk")
    args = parser.parse_args()
    if args.kind == "echo":
        uvloop.run(serve_echo(args.model, args.tokens_per_s))
    else:
        uvloop.run(serve_openai(args.tokens_per_s))


if __name__ == "__main__":
    main()
