"""An engine that stands in for others: asked by messages alone, perhaps for a model of another name. Knows no HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from engines.contract import (
    Capabilities,
    ChatPrompt,
    Delta,
    Engine,
    EngineBroken,
    EngineLoad,
    GenerateRequest,
    Unsupported,
)


class StandIn:
    """Owns `engine` and closes it. `names`: our names of models and its own; empty: it is asked for as we are."""

    def __init__(self, engine: Engine, names: Mapping[str, str]) -> None:
        self._engine = engine
        self._names = dict(names)

    @property
    def name(self) -> str:
        return self._engine.name

    async def capabilities(self) -> Capabilities:
        """Its own, less all that goes by token ids: whose model it is, is not known.

        Raises EngineBroken where nothing is left: it takes no messages.
        """
        found = await self._engine.capabilities()
        if not found.takes_chat:
            why = f"{self.name} takes token ids only (kind {found.kind}), and a fallback is asked by messages"
            raise EngineBroken(why, replica=self.name)
        return replace(
            found,
            models=tuple(self._names) or found.models,
            takes_ids=False,
            takes_delta=False,
            takes_shift=False,
            continues=False,
            returns_ids=False,
            kv_events=False,
            keeps_sessions=False,
            prefills=False,
            adapters=(),
            routes=frozenset(),
            tokenizer=None,
            fingerprints={},
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if not isinstance(request.prompt, ChatPrompt):
            raise Unsupported(f"{self.name} is asked by messages only", param="prompt", replica=self.name)
        asked = replace(request, model=self._names.get(request.model, request.model))
        async with aclosing(self._engine.generate(asked)) as deltas:
            async for delta in deltas:
                yield delta

    async def load(self) -> EngineLoad:
        return await self._engine.load()

    async def tokenize(self, text: str, *, model: str) -> list[int] | None:
        """Its ids are not ours."""
        return None

    async def forget(self, session: str, salt: str) -> None:
        """It was told no session's name."""

    async def aclose(self) -> None:
        await self._engine.aclose()
