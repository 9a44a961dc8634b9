"""Echo engines that fail in ways of their own, for the tests of failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from engines.contract import (
    Capabilities,
    Delta,
    EngineBroken,
    EngineLost,
    EngineOverloaded,
    Generated,
    GenerateRequest,
    IdsPrompt,
    Usage,
)
from engines.echo import EchoEngine
from engines.echo_tokens import IM_START, pack, unpack

ANSWER = [IM_START, *b"assistant\n"]  # what the template writes in front of an answer


class Fate:
    """The first `times` answers of some replicas, whichever of them give them, end after `ids` ids."""

    def __init__(self, ids: int = 0, times: int = 1) -> None:
        self.ids, self.times = ids, times
        self.halted = 0  # answers that wait for ever


class Mortal(EchoEngine):
    """Loses the stream when its `fate` says so; one id a delta, so that the fate may say any."""

    def __init__(self, *, fate: Fate, **more: Any) -> None:
        super().__init__(chunk_tokens=1, **more)
        self._fate = fate

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        doomed, sent = self._fate.times > 0, 0
        self._fate.times -= doomed
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                if doomed and sent == self._fate.ids:
                    raise EngineLost("it was to be", replica=self.name)
                yield delta
                sent += 1


class Foreign(Mortal):
    """Completes a prompt as vLLM does: it does not know which of its ids were generated, and where a text began."""

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), kind="vllm", continues=False)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        prompt = request.prompt
        assert isinstance(prompt, IdsPrompt)
        assert prompt.generated is None
        ids = unpack(await prompt.whole())
        made = len(ids) - next(
            at for at in range(len(ids), 0, -1) if ids[at - len(ANSWER) : at] == ANSWER
        )  # behind the last answer's head
        if made:
            begun = replace(prompt, delta=pack(ids), base=None, generated=Generated(made, 0))
            sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens + made, stop=())
            request = replace(request, prompt=begun, sampling=sampling)
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                usage = delta.usage
                if usage is not None:
                    usage = Usage(usage.prompt_tokens + made, usage.output_tokens - made, usage.cached_tokens)
                yield delta._replace(text="what a completion begins with", usage=usage) if made else delta


class Chatty(Mortal):
    """Takes messages and nothing else."""

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), kind="openai", takes_ids=False)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta._replace(ids=())


class Forger(EchoEngine):
    """Puts an id that is no token's into an answer where its `fate` says so."""

    def __init__(self, *, fate: Fate, **more: Any) -> None:
        super().__init__(chunk_tokens=1, **more)
        self._fate = fate

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        forged, sent = self._fate.times > 0, 0
        self._fate.times -= forged
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                sent += 1
                yield delta._replace(ids=(*delta.ids, 4_000_000_000)) if forged and sent == self._fate.ids else delta


class Fragile(EchoEngine):
    """Breaks over a prompt with a certain word."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        assert isinstance(request.prompt, IdsPrompt)
        if b"poison" in bytes(token for token in unpack(await request.prompt.whole()) if token < 256):
            raise EngineBroken("internal error (status 500)", replica=self.name)
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta


class Limited(EchoEngine):
    """Has a rate limit, which is reached while `left` is above 0."""

    def __init__(self, *, left: int, **more: Any) -> None:
        super().__init__(**more)
        self.left = left

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if self.left > 0:
            self.left -= 1
            raise EngineOverloaded("slow down", retry_after_s=7, limited=True, replica=self.name)
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta


class Halting(Mortal):
    """Goes on with no answer: it says nothing to such a request."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if isinstance(request.prompt, IdsPrompt) and request.prompt.generated is not None:
            self._fate.halted += 1
            try:
                await asyncio.Event().wait()
            finally:
                self._fate.halted -= 1
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                yield delta
