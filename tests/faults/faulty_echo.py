"""An engine process without a model that tells of its cache by KV events, and fails while it runs as it is told.

python -m tests.faults.faulty_echo PORT TOKENS_PER_S        (0: as fast as it goes)
POST /fault    {"status": 429}       every request is answered so; 500 likewise
               {"malformed": 3}      every answer's third piece is preceded by one that is no event
               {"tokens_per_s": 20}  a slow one
               {}                    well again
POST /flush    its cache is empty, and no event says so
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.echo import ECHO_MODEL_DIR, EchoEngine
from engines.echo_paths import PathStore
from engines.kv_stream import KvStream, ResidentBlocks
from engines.local.asgi import read_body, send_bytes, send_json
from engines.local.backend import ModelInfo
from engines.local.in_process import InProcess
from engines.local.kv.events import KvPublisher
from engines.local.server import create_app
from engines.local.wire import CONTENT_TYPE

GENERATE = "/turnkeep/v1/generate"
NO_EVENT = b'data: {"ids": [1, 2,\n\n'


class FlushedEcho(EchoEngine):
    def __init__(self, *, tokens_per_s: float | None, kv: KvStream, epoch: str) -> None:
        super().__init__(tokens_per_s=tokens_per_s, kv=kv, epoch=epoch)
        self._stream, self.pace = kv, tokens_per_s

    def slow(self, tokens_per_s: float | None) -> None:
        self._tokens_per_s = tokens_per_s

    def flush(self) -> None:
        self.paths = PathStore(block_size=self.paths.block_size, num_blocks=self.paths.num_blocks, log=self._log)
        self._stream.resident = ResidentBlocks()  # who asks anew is told the truth


class Faulty:
    """The engine's front, as it is while `fault` stands."""

    def __init__(self, app: ASGIApp, engine: FlushedEcho) -> None:
        self._app, self._engine = app, engine
        self._fault: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/fault":
                body = await read_body(scope, receive, limit=1000, content_type="application/json")
                self._fault = orjson.loads(body)
                self._engine.slow(self._fault.get("tokens_per_s", self._engine.pace))
                await send_json(send, self._fault)
            case "/flush":
                blocks = self._engine.paths.cached_blocks
                self._engine.flush()
                await send_json(send, {"blocks": blocks})
            case path if path == GENERATE and "status" in self._fault:
                await read_body(scope, receive, limit=8 << 20, content_type=CONTENT_TYPE)
                told = {"error": {"code": "engine_error", "message": "as it was told"}}
                await send_bytes(send, orjson.dumps(told), status=self._fault["status"], retry_after_s=1)
            case path:
                spoilt = path == GENERATE and "malformed" in self._fault
                await self._app(scope, receive, _spoilt(send, self._fault["malformed"]) if spoilt else send)


def _spoilt(send: Send, at: int) -> Send:
    pieces = 0

    async def spoilt(message: Message) -> None:
        nonlocal pieces
        if message["type"] == "http.response.body":
            pieces += 1
            if pieces == at:
                message = message | {"body": NO_EVENT + message.get("body", b"")}
        await send(message)

    return spoilt


async def serve(port: int, tokens_per_s: float) -> None:
    epoch = secrets.token_hex(8)  # as the real one: another life, another epoch
    stream = KvStream(time.time)
    async with KvPublisher(stream, "tcp://127.0.0.1:0") as kv:
        engine = FlushedEcho(epoch=epoch, tokens_per_s=tokens_per_s or None, kv=stream)
        info = ModelInfo("echo", ECHO_MODEL_DIR, 131_072, 259, engine.paths.block_size, "none", "none", epoch)
        app = create_app(InProcess(engine, info), clock=time.monotonic, now=time.time, kv=kv)
        config = uvicorn.Config(
            Faulty(app, engine), host="127.0.0.1", port=port, log_level="warning", lifespan="off", http="httptools"
        )
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
