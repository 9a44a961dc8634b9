"""An engine process without a model that does, at each request, what a file tells it: for faults of a compaction.

    python -m tests.faults.told_echo PORT FILE [MODEL]

    FILE        {"summary": {"says": "...", "delta_s": 0.2, "after": 3, "then": "die"}, "prefill": {...}, "turn": {...}}
    FILE.seen   a line for each request that begins or ends, as `summary begins`

`after`: deltas that are sent before `then` happens: hang, die (kill -9 of this process), lose (the stream breaks) or
refuse. `delta_s`: pause before each delta; it is read anew all the while, the rest at each request.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import uvicorn

from engines.contract import Delta, EngineLost, EngineUnreachable, GenerateRequest, Sampling
from engines.echo import ECHO_MODEL_DIR, EchoEngine
from engines.local.backend import ModelInfo
from engines.local.in_process import InProcess
from engines.local.server import create_app
from tests.gateway.talks import ANSWER, ASKED, WINDOW, noted


def kind_of(request: GenerateRequest) -> str:
    """A gateway names the requests of a compaction after it."""
    if not request.request_id.startswith("cmp_"):
        return "turn"
    return "prefill" if request.request_id.endswith("-prefill") else "summary"


class ToldEngine(EchoEngine):
    def __init__(self, told: Path, **more: Any) -> None:
        super().__init__(answer=self._say, window=WINDOW, **more)
        self._file = told

    def _told(self, kind: str) -> dict[str, Any]:
        return dict(json.loads(self._file.read_text()).get(kind, {}))

    def _note(self, line: str) -> None:
        with self._file.with_name(f"{self._file.name}.seen").open("a") as seen:
            seen.write(f"{line}\n")

    def _say(self, text: str, sampling: Sampling) -> str:
        if ASKED in text:
            return str(self._told("summary").get("says") or noted(text))
        return text[:ANSWER]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        kind = kind_of(request)
        told = self._told(kind)
        self._note(f"{kind} begins")
        sent = 0
        try:
            await self._at(told, sent)
            async with aclosing(super().generate(request)) as deltas:
                async for delta in deltas:
                    await self._pause(kind)
                    yield delta
                    sent += 1
                    await self._at(told, sent)
        finally:
            self._note(f"{kind} ends")

    async def _pause(self, kind: str) -> None:
        """Before a delta; told otherwise meanwhile, it goes on at once."""
        waited = 0.0
        while waited < self._told(kind).get("delta_s", 0):
            await asyncio.sleep(0.02)
            waited += 0.02

    async def forget(self, session: str, salt: str) -> dict[str, int] | None:
        gone = await super().forget(session, salt)
        self._note("forgets")
        return gone

    async def _at(self, told: dict[str, Any], sent: int) -> None:
        then = told.get("then")
        if then is None or told.get("after", 0) != sent:
            return
        if then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if then == "hang":
            await asyncio.Event().wait()
        raise EngineLost("the stream breaks") if then == "lose" else EngineUnreachable("refused")


def main(port: str, told: str, model: str = "echo") -> None:
    epoch = secrets.token_hex(8)
    engine = ToldEngine(Path(told), model=model, epoch=epoch)
    info = ModelInfo(model, ECHO_MODEL_DIR, WINDOW, 259, 32, "none", "none", epoch)
    app = create_app(InProcess(engine, info), clock=time.monotonic, now=time.time)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", lifespan="off")


if __name__ == "__main__":
    main(*sys.argv[1:])
