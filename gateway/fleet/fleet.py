"""The replicas of this gateway, each probed in the background by itself, and the models they serve.

Knows no session and no store. A model is served by ids where its tokenizer is at hand and proven equal to the
replica's own; else by chat.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager

import structlog

from engines.contract import Capabilities, EngineError, EngineTimeout, KvSource
from gateway.fleet.outlook import Outlook
from gateway.fleet.replica import Replica

log = structlog.get_logger(__name__)

PROBE_EVERY_S = 2.0
PROBE_AGAIN_S = 1.0  # while it is not well: it is back within two probes
PROBE_TIMEOUT_S = 5.0
FEED_AGAIN_S = 5.0  # whether an engine without a feed has one by now
RESYNC_S = 30.0  # a feed that was caught lying is heard anew after so long
LEAVE_S = 3600.0  # running turns of a replica that left get this long, then its connections are closed

OnProbed = Callable[[Replica, Capabilities], Awaitable[None]]


class Fleet:
    """`clock`: seconds, monotonic; `wall`: seconds since 1970. `pin_ttl_s`: a session idle for longer has no pin.

    on_probed      awaited with what a good probe told, before the replica is in rotation with it: loads and proves the
                   tokenizers of what it serves
    on_left        a replica went away, or another one took its name
    on_restarted   its epoch changed: here as there nothing of it is cached any more
    find           looks for a replica that a session is pinned to and that is not known here
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        on_probed: OnProbed,
        wall: Callable[[], float] = time.time,
        pin_ttl_s: float = math.inf,
    ) -> None:
        self._clock = clock
        self.wall, self.pin_ttl_s = wall, pin_ttl_s
        self._on_probed = on_probed
        self._replicas: dict[str, Replica] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._feeds: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self.on_left: list[Callable[[Replica], None]] = []
        self.on_restarted: list[Callable[[Replica], None]] = []
        self.find: Callable[[str], Awaitable[None]] = _nowhere
        self.outlook = Outlook()

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    def now(self) -> float:
        return self._clock()

    @property
    def models(self) -> list[str]:
        """What the replicas that answer can serve, in order of name."""
        return sorted({m for r in self if r.capabilities is not None for m in r.capabilities.models})

    def get(self, name: str) -> Replica | None:
        return self._replicas.get(name)

    async def join(self, replica: Replica) -> None:
        """Add a replica, or put it in the place of the one of the same name, and probe it at once, then ever again."""
        self.leave(replica.name)
        self._replicas[replica.name] = replica
        await self._probe_once(replica)
        if self._replicas.get(replica.name) is replica:
            watch = asyncio.create_task(self._watch(replica), name=f"probe-{replica.name}")
            self._probes[replica.name] = watch
            if isinstance(replica.engine, KvSource):
                listening = asyncio.create_task(self._listen(replica, replica.engine), name=f"kv-{replica.name}")
                self._feeds[replica.name] = listening

    def leave(self, name: str) -> Replica | None:
        """Take a replica out at once. Its running turns end, those that wait go elsewhere; then it is closed."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return None
        for tasks in (self._probes, self._feeds):
            if (task := tasks.pop(name, None)) is not None:
                task.cancel()
        self.outlook.left(name)
        replica.drain("it was removed", self.now())
        for told in self.on_left:
            told(replica)
        closing = asyncio.create_task(_closed_when_idle(replica), name=f"leave-{name}")
        self._leaving.add(closing)
        closing.add_done_callback(self._leaving.discard)
        return replica

    async def probe(self, replica: Replica) -> None:
        """Ask the replica what it can do and how busy it is; never raises EngineError."""
        began = self.wall()
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                capabilities = await replica.engine.capabilities()
                load = await replica.engine.load()
        except TimeoutError:
            replica.probe_failed(f"no answer to a probe within {PROBE_TIMEOUT_S:g} s", self.now(), late=True)
            self._give_up(replica)
        except EngineError as error:
            replica.probe_failed(str(error), self.now(), late=isinstance(error, EngineTimeout))
            self._give_up(replica)
        else:
            before = replica.capabilities
            await self._on_probed(replica, capabilities)
            if replica.capabilities is not None and replica.capabilities.epoch != capabilities.epoch:
                self.outlook.restarted(replica.name)
            if self._replicas.get(replica.name) is replica:
                self.outlook.joined(
                    replica.name,
                    model=next(iter(capabilities.models), ""),
                    capacity_tokens=(load.kv_blocks_total or 0) * (capabilities.block_size or 0),
                    block_tokens=capabilities.block_size,
                    now=began,
                )
            replica.probe_answered(capabilities, load, self.now())
            if before is not None and before.epoch != capabilities.epoch:
                for told in self.on_restarted:
                    told(replica)

    def _give_up(self, replica: Replica) -> None:
        """What runs at a replica that hangs goes on elsewhere, where there is an elsewhere; else it goes on waiting."""
        if replica.healthy or not replica.late or replica.capabilities is None:
            return
        others = [other for other in self if other is not replica and other.available(self.now())]
        if any(other.serves(model) for other in others for model in replica.capabilities.models):
            replica.abandon()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """At the end of the context every probe is stopped and every engine closed."""
        try:
            yield
        finally:
            tasks = [*self._probes.values(), *self._feeds.values(), *self._leaving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for replica in self:
                await replica.engine.aclose()

    async def _watch(self, replica: Replica) -> None:
        """A replica that hangs delays no other: each has a task of its own."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S if replica.healthy else PROBE_AGAIN_S)
            await self._probe_once(replica)

    async def _listen(self, replica: Replica, source: KvSource) -> None:
        """What the replica tells of its cache. A feed that answers have shown to be wrong is begun anew; an engine that
        has none may be started again with one."""
        while True:
            if (feed := source.kv_feed()) is None:
                await asyncio.sleep(FEED_AGAIN_S)
                continue
            try:
                async with aclosing(feed) as items:
                    async for item in items:
                        self.outlook.hear(replica.name, item, self.wall())
                        if not self.outlook.tells(replica.name):
                            break
            except Exception:  # a mistake of ours: what was noted still places turns
                log.exception("a KV feed failed inside the gateway", replica=replica.name)
            self.outlook.silent(replica.name)
            await asyncio.sleep(RESYNC_S)

    async def _probe_once(self, replica: Replica) -> None:
        """One bad round never ends the probes: without them a replica would be away for ever."""
        try:
            await self.probe(replica)
        except Exception:
            log.exception("a probe failed inside the gateway", replica=replica.name)


async def _closed_when_idle(replica: Replica) -> None:
    try:
        async with asyncio.timeout(LEAVE_S):
            await replica.queue.idle()
    except TimeoutError:
        log.warning("a removed replica still has turns", replica=replica.name, turns=replica.in_flight)
    finally:
        await replica.engine.aclose()


async def _nowhere(name: str) -> None:
    """There is no other place to look."""
