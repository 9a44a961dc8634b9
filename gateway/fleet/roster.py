"""Which replicas there should be, and that they are: those of the settings, and those that somebody added since.

The database says what was added, removed and drained; every gateway looks once a second, and whoever changed something
at once. So a change is known everywhere within two seconds, and outlives every restart.

    settings, rows of `replicas` --wanted--> joined, as it answers --row says draining--> takes no more turns
                                             `-not wanted any more--> leaves: its turns end, then it is closed
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import structlog
from pydantic import ValidationError

from engines.contract import EngineError
from gateway.background import repeated
from gateway.fleet.fleet import Fleet
from gateway.fleet.member import Member, upstream_member
from gateway.fleet.replica import Replica
from gateway.sealing import CannotOpen, unseal
from gateway.settings import Settings
from gateway.store.records import StoreUnavailable
from gateway.store.replica_records import ReplicaRecord
from gateway.store.replica_store import ReplicaStore
from gateway.upstream import UpstreamAddress

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 1.0
CONNECT_AGAIN_S = 1.0


class Roster:
    """`on_draining`: a replica takes no more turns from now on. `on_joining`: it takes the first ones once this
    returns; True: this gateway alone reaches it."""

    def __init__(self, store: ReplicaStore, fleet: Fleet, settings: Settings, *, secret: bytes) -> None:
        self._store, self._fleet, self._settings, self._secret = store, fleet, settings, secret
        self._fixed = {upstream.name: upstream_member(settings, upstream) for upstream in settings.upstreams}
        self._members: dict[str, Member] = {}  # that joined, or try to
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._looking = asyncio.Lock()
        self._found_at = -LOOK_EVERY_S
        self.records: dict[str, ReplicaRecord] = {}
        self.trouble: dict[str, str] = {}  # name -> why it did not join so far
        self.on_draining: Callable[[Replica], None] = lambda replica: None
        self.on_joining: Callable[[Replica, bool], Awaitable[None]] = _nothing

    @property
    def pending(self) -> dict[str, Member | None]:
        """Replicas that have not joined yet, by name; None: not even their key can be read."""
        waiting = {name: self._members.get(name) for name in (*self._members, *self.trouble)}
        return {name: member for name, member in waiting.items() if self._fleet.get(name) is None}

    def taken_by(self, name: str, url: str) -> str | None:
        """The replica that has this name or this URL already, but for one that was added at runtime: the store says."""
        known: list[tuple[str, str]] = [(replica.name, replica.url) for replica in self._fleet]
        known += [(member.name, member.url) for member in self._members.values()]
        added = {record.name for record in self.records.values() if record.source == "api"}
        return next((n for n, u in known if n not in added and (n == name or u == url)), None)

    async def join(self, replica: Replica) -> None:
        """A replica that this gateway connected to by itself, in the state that the database knows."""
        await self._enter(replica, own=True)

    async def _enter(self, replica: Replica, *, own: bool) -> None:
        await self.on_joining(replica, own)
        self._obey(replica)
        await self._fleet.join(replica)

    async def refresh(self) -> None:
        """Do what the database says now. Raises StoreUnavailable."""
        async with self._looking:
            self.records = {record.name: record for record in await self._store.list_replicas()}
            self.trouble = {
                name: why for name, why in self.trouble.items() if name in self._fixed or name in self.records
            }
            added, unreadable = self._added(self.records.values())
            wanted = self._fixed | added
            for name in changed(self._members, wanted):
                self._leave(name)
            self.trouble |= unreadable
            begun = [self._begin(wanted[name]) for name in wanted if name not in self._members]
            for replica in self._fleet:
                self._obey(replica)
        if begun:
            await asyncio.wait(begun, timeout=self._settings.connect_timeout_s)

    async def find(self, name: str) -> None:
        """Look for a replica that this gateway does not know, though a session is pinned to it: another gateway may
        have added it a moment ago. Not more often than once a second, and for no longer."""
        now = self._fleet.now()
        if now - self._found_at < LOOK_EVERY_S:
            return
        self._found_at = now
        try:
            async with asyncio.timeout(LOOK_EVERY_S):
                await self.refresh()
        except (TimeoutError, StoreUnavailable) as error:
            log.warning("replica %s: it is not known here: %s", name, error or "no answer in time")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Replicas that answer at once have joined when the context opens."""
        try:
            await self.refresh()
            async with repeated(self.refresh, every_s=LOOK_EVERY_S, name="replica-roster"):
                yield
        finally:
            for task in self._joining.values():
                task.cancel()
            await asyncio.gather(*self._joining.values(), return_exceptions=True)

    def _added(self, records: Iterable[ReplicaRecord]) -> tuple[dict[str, Member], dict[str, str]]:
        """Those of the records, by name; and of those that cannot be read, why."""
        found, unreadable = {}, {}
        for record in records:
            if record.source != "api" or record.name in self._fixed:
                continue
            try:
                found[record.name] = member_of_record(self._settings, self._secret, record)
            except (CannotOpen, ValidationError) as error:
                unreadable[record.name] = str(error)
        return found, unreadable

    def _begin(self, member: Member) -> asyncio.Task[None]:
        self._members[member.name] = member
        task = asyncio.create_task(self._keep_connecting(member), name=f"connect-{member.name}")
        self._joining[member.name] = task
        return task

    def _leave(self, name: str) -> None:
        del self._members[name]
        self.trouble.pop(name, None)
        self._joining.pop(name).cancel()
        self._fleet.leave(name)

    async def _keep_connecting(self, member: Member) -> None:
        """One that is not up yet joins when it is."""
        while True:
            try:
                await self._try(member)
            except EngineError as error:
                if self.trouble.get(member.name) != str(error):
                    log.warning("replica %s: %s; trying again", member.name, error)
                    self.trouble[member.name] = str(error)
                await asyncio.sleep(CONNECT_AGAIN_S)
            except Exception as error:  # a mistake of ours: it must not keep the replica away for ever
                log.exception("connecting to a replica failed inside the gateway", replica=member.name)
                self.trouble[member.name] = repr(error)[:200]
                await asyncio.sleep(CONNECT_AGAIN_S)
            else:
                self.trouble.pop(member.name, None)
                return

    async def _try(self, member: Member) -> None:
        engine = await member.connected()
        try:
            await self._enter(member.replica(engine), own=False)
        except Exception:  # the next try connects anew
            await engine.aclose()
            raise

    def _obey(self, replica: Replica) -> None:
        record, now = self.records.get(replica.name), self._fleet.now()
        if record is None or record.state == "active":
            replica.undrain(now, "" if record is None else record.reason)
            return
        begins = not replica.draining
        reason = f"drained: {record.reason}" if record.reason else "somebody drains it"
        replica.drain(reason, now, drained=record.state == "drained")
        if begins:
            self.on_draining(replica)


async def _nothing(replica: Replica, own: bool) -> None:
    """Nobody asked to be told."""


def changed(members: Mapping[str, Member], wanted: Mapping[str, Member]) -> list[str]:
    """Names of members that are wanted no more, or on other terms."""
    return [name for name, member in members.items() if wanted.get(name) != member]


def member_of_record(settings: Settings, secret: bytes, record: ReplicaRecord) -> Member:
    """Raises CannotOpen, ValidationError for terms that a newer version wrote."""
    key = None if record.credential is None else unseal(secret, record.credential, purpose_of(record.name, record.url))
    address = UpstreamAddress.model_validate(
        {**record.terms, "name": record.name, "url": record.url, **({"api_key": key} if key is not None else {})}
    )
    return upstream_member(settings, address, source="api")


def purpose_of(name: str, url: str | None) -> str:
    """What a replica's key is sealed for: it opens for no other name and no other URL."""
    return f"{name} {url}"
