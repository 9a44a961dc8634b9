"""A Starlette app on a real socket, in a thread with its own event loop, and faults laid over its answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.contract import Delta, EngineLost
from tests.quick_server import QuickServer


@dataclass(frozen=True, slots=True)
class Canned:
    """An answer given instead of the app's."""

    status: int = 200
    content_type: str = "application/json"
    chunks: tuple[bytes, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


Mangle = Callable[[int, bytes], list[bytes]]  # number of the body's chunk, chunk -> what is sent instead


@dataclass(slots=True)
class FaultLayer:
    """ASGI middleware: `canned` replaces, `mangle` rewrites the answer of every POST to one of `paths`."""

    app: ASGIApp
    paths: tuple[str, ...]
    canned: Canned | None = None
    mangle: Mangle | None = None
    requests: list[bytes] = field(default_factory=list)  # bodies seen
    sent_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self.paths:
            await self.app(scope, receive, send)
        elif self.canned is not None:
            await self._send_canned(self.canned, receive, send)
        else:
            await self.app(scope, self._recording(receive), self._mangling(self._counting(send)))

    async def _send_canned(self, canned: Canned, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", canned.content_type.encode())]
        headers += [(name.encode(), value.encode()) for name, value in canned.headers]
        await send({"type": "http.response.start", "status": canned.status, "headers": headers})
        for chunk in canned.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    def _recording(self, receive: Receive) -> Receive:
        body: list[bytes] = []

        async def record() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.append(message.get("body", b""))
                if not message.get("more_body"):
                    self.requests.append(b"".join(body))
            return message

        return record

    def _counting(self, send: Send) -> Send:
        async def count(message: Message) -> None:
            await send(message)
            self.sent_bytes += len(message.get("body", b""))

        return count

    def _mangling(self, send: Send) -> Send:
        if (mangle := self.mangle) is None:
            return send
        number = 0

        async def mangled(message: Message) -> None:
            nonlocal number
            if message["type"] != "http.response.body" or not message.get("body"):
                await send(message)
                return
            for piece in mangle(number, message["body"]):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            number += 1
            if not message.get("more_body"):
                await send({"type": "http.response.body", "body": b""})

        return mangled


class LiveServer:
    """`with LiveServer(app) as server:` serves on `server.port` of the loopback."""

    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = QuickServer(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10), "the server did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not stop"

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            if serving.done():
                serving.result()
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self._started.set()
        await serving


async def first_delta(request: Request, deltas: AsyncGenerator[Delta, None]) -> Delta:
    """The first delta, unless the client leaves before it: then the engine is cancelled. Raises EngineError."""
    first = asyncio.ensure_future(anext(deltas))
    gone = asyncio.ensure_future(_until_gone(request))
    await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not first.done():
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await deltas.aclose()
        raise EngineLost("the client left")
    return first.result()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
