"""Where something of a session may be beside its rows, and how those places forget it: replicas, each gateway's memory,
the database's own files.

    erased, archived -> noted for every place, in one transaction   (store.erase)
    once a second    -> what is due at the places that this gateway reaches is done, or put off and tried again

What is noted outlives every restart; a place that is away is waited for until it is back, or taken for gone. Nothing is
told to a place twice, unless whoever told it died over it: to forget twice is to forget.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import structlog

from engines.contract import EngineError
from gateway.background import repeated
from gateway.fleet.replica import Replica
from gateway.sessions.room import TurnRoom
from gateway.sessions.summariser import beside
from gateway.store.erasure_records import ARCHIVED, DATABASE, Forgetting, Place, Receipt
from gateway.store.records import StoreUnavailable

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0
SEEN_EVERY_S = 15.0
MEMORY_S = 60.0  # a gateway that said nothing for so long is dead, and its memory with it
CLAIM_S = 300.0  # of a part: a replica has a minute for each name
AT_ONCE = 20  # sessions of a part
BUSY_S = 2.0  # a turn runs, of a session that was made anew under the same id
MOST_WAIT_S = 300.0  # between two tries
PATIENCE_S = 3.0  # with other gateways, while somebody waits for the receipt
POLL_S = 0.05


class Places:
    """`gateway`: the name of this one. `gone_after_s`: a replica that no gateway has seen for so long is gone."""

    def __init__(self, room: TurnRoom, *, gateway: str, gone_after_s: float) -> None:
        self._room, self._gone_after_s = room, gone_after_s
        self._elsewhere = f" of {gateway}"  # how the names end of what this gateway alone reaches
        self._gateway = gateway
        self._memory = Place(f"memory{self._elsewhere}", "memory", gateway)
        self._own: dict[str, Place] = {}  # replica -> its place, of those that this gateway alone reaches
        self._unknown: dict[str, Place] = {}  # to the database, so far
        self._looks: set[asyncio.Task[None]] = set()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def name_of(self, replica: str) -> str:
        """Of a replica's place."""
        own = self._own.get(replica)
        return own.name if own is not None else replica

    async def joins(self, replica: Replica, own: bool, *, lasts: bool = True) -> None:
        """Erasures wait for it from now on: it may take turns. `lasts`: what it holds outlives this gateway."""
        place = Place(replica.name)
        if own:
            kind = "replica" if lasts else "engine"
            place = Place(f"{replica.name}{self._elsewhere}", kind, self._gateway)  # type: ignore[arg-type]
            self._own[replica.name] = place
        await self._add(place)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for place in (Place(DATABASE, "database"), self._memory):
            await self._add(place)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(repeated(self.look, every_s=LOOK_EVERY_S, name="forgettings"))
            await stack.enter_async_context(repeated(self.seen, every_s=SEEN_EVERY_S, name="places"))
            yield
        for task in self._looks:
            task.cancel()
        with suppress(StoreUnavailable):  # then it is taken for gone in a while
            await self._room.store.leave_place(self._memory.name)

    async def look(self) -> None:
        """Do what is due at the places that are reached from here. Raises StoreUnavailable."""
        for place in list(self._unknown.values()):
            await self._add(place)
        reached = self._reached()
        due = [name for name in await self._room.store.due_places() if name in reached]
        await asyncio.gather(*(self._work(name) for name in _memory_first(due)))

    async def soon(self) -> None:
        """`look`, now; it goes on by itself where it takes longer than PATIENCE_S."""
        task = asyncio.create_task(self.look(), name="forgettings-now")
        self._looks.add(task)
        task.add_done_callback(self._looked)
        await asyncio.wait({task}, timeout=PATIENCE_S)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("what is to be forgotten waits for the next look", reason=str(error))

    async def seen(self) -> None:
        """Say which places are still there, and take those for gone that nobody has seen for long."""
        names = [self._memory.name, DATABASE, *(self.name_of(replica.name) for replica in self._room.fleet)]
        await self._add(self._memory)
        await self._room.store.see_places(names, memory_s=MEMORY_S, replicas_s=self._gone_after_s)

    async def hasten(self, tenant_id: str, erasure_id: str) -> Receipt | None:
        """The receipt once all have forgotten that can be reached now, by this gateway or another that lives."""
        until, before = time.monotonic() + PATIENCE_S, None
        while True:
            receipt = await self._room.store.get_receipt(tenant_id, erasure_id)
            if receipt is None or receipt.status != "pending":
                return receipt
            waiting = {name: told["left"] for name, told in receipt.places.items() if told["state"] == "pending"}
            reached = self._reached()
            others = [name for name in waiting if " of " in name and not name.endswith(self._elsewhere)]
            if waiting == before and (not others or time.monotonic() > until):
                return receipt
            if waiting == before:
                await asyncio.sleep(POLL_S)
            before = waiting
            for name in _memory_first([name for name in waiting if name in reached]):
                await self._work(name, of=(tenant_id, erasure_id))

    # ------------------------------------------------------------------
    async def _add(self, place: Place) -> None:
        """Tried again with the next look where the database is away."""
        self._unknown[place.name] = place
        try:
            await self._room.store.add_place(place)
        except StoreUnavailable as error:
            log.warning("a place is not known to the database yet", place=place.name, reason=str(error))
        else:
            self._unknown.pop(place.name, None)

    def _reached(self) -> dict[str, Replica | None]:
        """Place -> its replica; None: none."""
        found: dict[str, Replica | None] = {DATABASE: None, self._memory.name: None}
        return found | {self.name_of(r.name): r for r in self._room.fleet if r.healthy and r.capabilities is not None}

    async def _work(self, place: str, of: tuple[str, str] | None = None) -> None:
        """A part of what is due at a place. `of`: (tenant, receipt) alone."""
        store, left = self._room.store, list[Forgetting]()
        async with self._locks[place]:
            try:
                left = await store.claim_forgettings(place, AT_ONCE, CLAIM_S, of=of)
                if place == DATABASE:
                    await self._clean(left)
                    return
                while left:
                    await self._one(left[0])
                    del left[0]
            except EngineError as error:
                log.warning("a place does not forget yet", place=place, reason=str(error))
                for one in left:
                    await store.put_off_forgetting(one, _wait_s(one.tries), str(error)[:300])

    async def _clean(self, claimed: list[Forgetting]) -> None:
        cleaned = not claimed or await self._room.store.clean()
        for one in claimed:
            if cleaned:
                await self._room.store.forgotten(one, "answered", {})
            else:
                await self._room.store.put_off_forgetting(
                    one, _wait_s(one.tries), "the database is busy, or did so a moment ago"
                )

    async def _one(self, one: Forgetting) -> None:
        """Raises EngineError, StoreUnavailable."""
        store, room = self._room.store, self._room
        standing = await store.standing(one.tenant_id, one.session_id)
        if standing == "running":
            await store.put_off_forgetting(one, BUSY_S, "a session of that id runs")
            return
        if one.erasure_id == ARCHIVED and standing == "idle":
            await store.forgotten(one, "answered", {})  # it was taken up again
            return
        replica = self._reached().get(one.place)
        if replica is None:
            if await room.forget(one.tenant_id, one.session_id) and standing == "gone":
                await store.forget_later(one.tenant_id, one.session_id)  # what was stopped here may have reached them
            await store.forgotten(one, "answered", {})
            return
        name, salt = room.session_name(one.tenant_id, one.session_id), room.cache_salt(one.tenant_id)
        gone: Counter[str] = Counter()
        cannot = False
        for named in (name, beside(name)):
            told = await replica.engine.forget(named, salt)
            cannot |= told is None
            gone.update(told or {})
        await store.forgotten(one, "cannot" if cannot else "answered", dict(gone))


def _memory_first(places: list[str]) -> list[str]:
    """What runs is stopped before replicas are asked to forget what it has them read."""
    return sorted(places, key=lambda name: (not name.startswith("memory of "), name == DATABASE, name))


def _wait_s(tries: int) -> float:
    """Before the next."""
    return min(MOST_WAIT_S, 2.0 ** min(tries, 10))
