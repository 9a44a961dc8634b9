"""An `engines.contract.Engine` as a Backend: EchoEngine behind the same wire, without torch and without a child."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.contract import Capabilities, Engine, EngineError, GenerateRequest, IdsPrompt, UnknownBase
from engines.local.backend import ModelInfo, State, Status
from engines.local.refusal import Refusal, refusal
from engines.local.wire import Event, WireRequest, delta_event, error_event, started_event


class InProcess:
    """Owns `engine` and closes it. The engine must take ids; of `kind` "turnkeep" is what it is reached through."""

    def __init__(self, engine: Engine, info: ModelInfo) -> None:
        self._engine = engine
        self._info = info

    @property
    def state(self) -> State:
        return "ok"

    @property
    def info(self) -> ModelInfo:
        return self._info

    async def generate(self, request: WireRequest) -> AsyncGenerator[list[Event], None]:
        if request.score_from is not None:
            raise Refusal("unsupported_parameter", "this engine has no log-probabilities to tell", param="score_from")
        async with aclosing(self._engine.generate(_contract_request(request))) as deltas:
            try:
                first = await anext(deltas, None)
            except UnknownBase as error:
                raise Refusal("unknown_base", str(error)) from None
            yield [started_event(request.prompt_tokens, None, 0.0)]
            try:
                delta = first
                while delta is not None:
                    yield [
                        delta_event(
                            delta.ids,
                            delta.text,
                            delta.logprobs,
                            finish=delta.finish,
                            stop=delta.stop,
                            usage=delta.usage,
                        )
                    ]
                    delta = await anext(deltas, None)
            except EngineError as error:
                yield [error_event(refusal(error))]

    async def status(self) -> Status:
        load = await self._engine.load()
        total, cached, used = load.kv_blocks_total or 0, load.kv_blocks_cached or 0, load.kv_blocks_used or 0
        return Status(load.running, load.waiting, total, total - cached - used, cached, used)

    async def capabilities(self) -> Capabilities:
        """The engine's own, reached by this wire: ids only, whatever else it can do."""
        found = await self._engine.capabilities()
        return replace(found, kind="turnkeep", takes_chat=False, takes_images=False, epoch=self._info.epoch)

    async def sessions(self) -> list[dict[str, Any]]:
        """The contract has no such list."""
        return []

    async def forget(self, session: str, salt: str | None) -> dict[str, int]:
        return await self._engine.forget(session, salt or "") or {}

    async def suspend(self, session: str, salt: str, to: str | None) -> dict[str, Any]:
        raise Refusal("unsupported", "this engine keeps no K/V")

    async def resume(self, session: str, salt: str) -> dict[str, Any]:
        raise Refusal("unsupported", "this engine keeps no K/V")

    async def save(self, session: str, salt: str) -> dict[str, Any]:
        raise Refusal("unsupported", "this engine keeps no K/V")

    async def adopt(self, path: Path, session: str, salt: str) -> dict[str, Any]:
        raise Refusal("unsupported", "this engine keeps no K/V")

    async def aclose(self) -> None:
        await self._engine.aclose()


def _contract_request(request: WireRequest) -> GenerateRequest:
    async def whole() -> bytes:
        if request.base is not None:
            raise UnknownBase(f"no path of {request.base.length} ids is kept", length=request.base.length)
        return request.delta

    generated = request.generated
    num_tokens = request.prompt_tokens + (generated.ids if generated is not None else 0)
    prompt = IdsPrompt(request.delta, num_tokens, whole, request.session, request.base, request.shift, generated)
    return GenerateRequest(request.request_id, request.model, prompt, request.sampling, request.salt, request.priority)
