"""An `engines.contract.Engine` as a Backend: EchoEngine behind the same wire, without torch and without a child."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
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
        async with aclosing(self._engine.generate(_contract_request(request))) as deltas:
            try:
                first = await anext(deltas, None)
            except UnknownBase as error:
                raise Refusal("unknown_base", str(error)) from None
            yield [started_event(_prompt_tokens(request), None, 0.0)]
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

    async def forget(self, session: str, salt: str | None) -> int:
        before = (await self._engine.load()).kv_blocks_cached or 0
        await self._engine.forget(session)
        return before - ((await self._engine.load()).kv_blocks_cached or 0)

    async def aclose(self) -> None:
        await self._engine.aclose()


def _prompt_tokens(request: WireRequest) -> int:
    return (request.base.length if request.base else 0) + len(request.delta) // 4


def _contract_request(request: WireRequest) -> GenerateRequest:
    async def whole() -> bytes:
        if request.base is not None:
            raise UnknownBase(f"no path of {request.base.length} ids is kept", length=request.base.length)
        return request.delta

    prompt = IdsPrompt(request.delta, _prompt_tokens(request), whole, request.session, request.base, request.shift)
    return GenerateRequest(request.request_id, request.model, prompt, request.sampling, request.salt, request.priority)
