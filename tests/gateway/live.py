"""A gateway on a real socket inside the test's loop, with engines given as values."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvicorn
from fastapi import FastAPI

from engines.contract import Engine
from engines.echo import ECHO_MODEL_DIR, EchoEngine
from gateway.api.wire import BoundedHttp
from gateway.app import create_app
from gateway.settings import Settings
from tests.quick_server import QuickServer

MODEL = "echo"


@dataclass(frozen=True)
class Live:
    app: FastAPI
    client: httpx.AsyncClient
    url: str

    async def chat(self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **more: Any) -> Any:
        body = {"model": MODEL, "messages": messages, "max_tokens": 64, **more}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers or {})

    async def session(self, **fields: Any) -> str:
        answer = await self.client.post("/v1/sessions", json=fields)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def turn(self, session_id: str, input: Any, headers: dict[str, str] | None = None, **more: Any) -> Any:
        body = {"input": input, "max_output_tokens": 64, **more}
        return await self.client.post(f"/v1/sessions/{session_id}/turns", json=body, headers=headers or {})

    async def turns(self, session_id: str, **query: Any) -> list[dict[str, Any]]:
        answer = await self.client.get(f"/v1/sessions/{session_id}/turns", params={"limit": 100, **query})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])


class Shifted:
    """The world's clock, which a test may step."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.by_s


@asynccontextmanager
async def live_gateway(
    folder: Path,
    engines: Mapping[str, Engine] | None = None,
    *,
    embed: bool = True,
    clock: Callable[[], float] = time.time,
    **settings: Any,
) -> AsyncIterator[Live]:
    """`embed`: with no engines named, an EchoEngine in process; else what `upstreams` in the settings says."""
    if engines is None and embed:
        engines = {"echo": EchoEngine()}
    given = {
        "data_dir": folder,
        "auth": False,
        "tokenizers": {MODEL: ECHO_MODEL_DIR},
        "grace_s": 2.0,
        "handover_s": 0,
        **settings,
    }
    app = create_app(Settings(**given), engines=engines, clock=clock)
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:  # said, or asyncio leaves Nagle on
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = QuickServer(
            uvicorn.Config(app, http=BoundedHttp, log_config=None, access_log=False, timeout_graceful_shutdown=2)
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                assert not serving.done(), "the gateway did not start"
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
                yield Live(app, client, url)
        finally:
            server.should_exit = True
            await serving


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each event of a stream; `[DONE]` ends it."""
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield orjson.loads(line[6:])
