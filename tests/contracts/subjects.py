"""The engines that the contract suite runs over, each with what it takes to ask it and to look behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from engines.contract import ChatPrompt, Engine, GenerateRequest, IdsPrompt, Sampling
from engines.echo import EchoEngine
from engines.echo_tokens import encode, pack
from engines.remote.http import Timeouts, Upstream
from engines.remote.llamacpp import LlamaCppEngine
from engines.remote.openai import OpenAiEngine
from engines.remote.sglang import SglangEngine
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.vllm import VllmEngine
from tests.contracts import llamacpp_app, openai_app, sglang_app, vllm_app, wire_app
from tests.contracts.live import FaultLayer, LiveServer
from tests.faults.proxy import FaultProxy

QUICK = Timeouts(connect_s=2.0, first_delta_s=10.0, idle_s=5.0, total_s=30.0, probe_s=5.0)


@dataclass(slots=True)
class Subject:
    """`engine` under test; `behind` the echo engine that answers; the rest where there is a socket between."""

    engine: Engine
    behind: EchoEngine
    ids: bool  # asks with token ids, else with messages
    layer: FaultLayer | None = None
    proxy: FaultProxy | None = None
    retry_after_s: float | None = 1.0  # what a full server says

    def ask(self, text: str, *, max_tokens: int = 64, model: str = "echo", **sampling: Any) -> GenerateRequest:
        """A request whose answer is `text`."""
        prompt = ids_prompt(chatml(text)) if self.ids else ChatPrompt([{"role": "user", "content": text}])
        return GenerateRequest("r-1", model, prompt, Sampling(max_tokens, **sampling))


def chatml(user: str) -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


def ids_prompt(text: str) -> IdsPrompt:
    packed = pack(encode(text))

    async def whole() -> bytes:
        return packed

    return IdsPrompt(packed, len(packed) // 4, whole)


@asynccontextmanager
async def in_process(**echo: Any) -> AsyncIterator[Subject]:
    engine = EchoEngine(**echo)
    yield Subject(engine, engine, ids=True)


@asynccontextmanager
async def behind_socket(
    app: Callable[[EchoEngine], ASGIApp],
    paths: tuple[str, ...],
    adapter: Callable[[Upstream], Engine],
    *,
    ids: bool,
    timeouts: Timeouts = QUICK,
    retry_after_s: float | None = 1.0,
    **echo: Any,
) -> AsyncIterator[Subject]:
    """adapter -> fault proxy -> uvicorn -> fault layer -> app -> EchoEngine."""
    behind = EchoEngine(**echo)
    layer = FaultLayer(app(behind), paths)
    with LiveServer(layer) as server:
        async with FaultProxy("127.0.0.1", server.port) as proxy:
            engine = adapter(Upstream(proxy.url, name="replica", timeouts=timeouts))
            try:
                yield Subject(engine, behind, ids, layer, proxy, retry_after_s)
            finally:
                await engine.aclose()
                async with asyncio.timeout(0.5):  # a connection that outlives its engine
                    while proxy.open_connections:  # noqa: ASYNC110 - the other end of a socket
                        await asyncio.sleep(0.002)


def turnkeep(**options: Any) -> Any:
    return behind_socket(wire_app.create_app, (wire_app.GENERATE,), TurnkeepEngine, ids=True, **options)


def turnkeep_as_vllm(**options: Any) -> Any:
    """Our engine's front as whoever takes it for a vLLM sees it."""
    return behind_socket(wire_app.create_app, (vllm_app.COMPLETIONS,), VllmEngine, ids=True, **options)


def vllm_ids(**options: Any) -> Any:
    paths = (vllm_app.COMPLETIONS, vllm_app.CHAT)
    return behind_socket(vllm_app.create_app, paths, VllmEngine, ids=True, **options)


def vllm_chat(**options: Any) -> Any:
    paths = (vllm_app.COMPLETIONS, vllm_app.CHAT)
    return behind_socket(vllm_app.create_app, paths, VllmEngine, ids=False, **options)


def openai(**options: Any) -> Any:
    return behind_socket(openai_app.create_app, (openai_app.CHAT,), OpenAiEngine, ids=False, **options)


def sglang_ids(**options: Any) -> Any:
    paths = (sglang_app.GENERATE, sglang_app.CHAT)
    return behind_socket(sglang_app.create_app, paths, SglangEngine, ids=True, retry_after_s=None, **options)


def sglang_steps(**options: Any) -> Any:
    """Started with --incremental-streaming-output."""
    app = partial(sglang_app.create_app, incremental=True)
    return behind_socket(app, (sglang_app.GENERATE,), SglangEngine, ids=True, retry_after_s=None, **options)


def sglang_chat(**options: Any) -> Any:
    paths = (sglang_app.GENERATE, sglang_app.CHAT)
    return behind_socket(sglang_app.create_app, paths, SglangEngine, ids=False, **options)


def llamacpp_ids(**options: Any) -> Any:
    paths = (llamacpp_app.COMPLETION, llamacpp_app.CHAT)
    return behind_socket(llamacpp_app.create_app, paths, LlamaCppEngine, ids=True, **options)


def llamacpp_chat(**options: Any) -> Any:
    paths = (llamacpp_app.COMPLETION, llamacpp_app.CHAT)
    return behind_socket(llamacpp_app.create_app, paths, LlamaCppEngine, ids=False, **options)


SOCKETS = {
    "turnkeep": turnkeep,
    "turnkeep_as_vllm": turnkeep_as_vllm,
    "vllm_ids": vllm_ids,
    "vllm_chat": vllm_chat,
    "sglang_ids": sglang_ids,
    "sglang_steps": sglang_steps,
    "sglang_chat": sglang_chat,
    "llamacpp_ids": llamacpp_ids,
    "llamacpp_chat": llamacpp_chat,
    "openai": openai,
}
MAKERS = {"echo": in_process, **SOCKETS}
