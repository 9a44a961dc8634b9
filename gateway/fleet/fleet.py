"""The replicas of this gateway, probed in the background, and the models they serve.

Knows no session and no store. A model is served by ids where its tokenizer is at hand and proven equal to the
replica's own; else by chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gateway.background import repeated
from gateway.fleet.replica import Replica, probe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROBE_EVERY_S = 2.0
PROBE_TIMEOUT_S = 5.0

OnProbed = Callable[[Replica], Awaitable[None]]


class Fleet:
    """`on_probed` is awaited after each good probe: it loads and proves the tokenizers of what the replica serves."""

    def __init__(self, *, clock: Callable[[], float], on_probed: OnProbed) -> None:
        self._clock = clock
        self._on_probed = on_probed
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def now(self) -> float:
        return self._clock()

    @property
    def models(self) -> list[str]:
        """What the replicas that answer can serve, in order of name."""
        return sorted({m for r in self if r.capabilities is not None for m in r.capabilities.models})

    def get(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    async def join(self, replica: Replica) -> None:
        """Add a replica, or put its new engine in the place of the one of the same name, and probe it at once."""
        old = self._replicas.get(replica.name)
        self._replicas[replica.name] = replica
        if old is not None:
            await old.engine.aclose()
        await self.probe(replica)

    async def probe(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await probe(replica, self._clock)
        except TimeoutError:
            replica.healthy = False
            replica.last_error = f"no answer to a probe within {PROBE_TIMEOUT_S:g} s"
        if replica.healthy:
            await self._on_probed(replica)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe every replica every two seconds while the context is open; close their engines at its end."""
        try:
            async with repeated(self._probe_all, every_s=PROBE_EVERY_S, name="fleet-probes"):
                yield
        finally:
            for replica in self:
                await replica.engine.aclose()

    async def _probe_all(self) -> None:
        for failed in await asyncio.gather(*(self.probe(r) for r in list(self)), return_exceptions=True):
            if isinstance(failed, Exception):  # the others were probed all the same
                raise failed
