"""Holds tenants and keys to their `kv_bytes`: what replicas keep of their sessions beyond it, they are told to forget.

Nobody is refused for it: a session whose K/V was given up is computed anew by its next turn. Idle sessions go, the
least recently used of each replica first; one that was used a moment ago stays, also beyond the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from engines.contract import EngineError, Kept, TellsKept
from gateway.fleet.fleet import Fleet
from gateway.fleet.replica import Replica
from gateway.limits.gate import Gate
from gateway.sessions.summariser import beside
from gateway.store.limit_records import Holder
from gateway.store.sessions import Store

log = structlog.get_logger(__name__)

EVERY_S = 5.0
IDLE_S = 30.0  # a session that was used since then may have a turn on its way


class KvKeeper:
    """`name_of`: (tenant, session) -> its name towards replicas; `salt_of`: tenant -> its cache salt; `forgot` hears of
    every session whose K/V was given up."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        gate: Gate,
        *,
        clock: Callable[[], float],
        name_of: Callable[[str, str], str],
        salt_of: Callable[[str], str],
        idle_s: float = IDLE_S,
        forgot: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._gate = gate
        self._clock = clock
        self._name_of = name_of
        self._salt_of = salt_of
        self._idle_s = idle_s
        self._forgot = forgot

    async def round(self) -> None:
        """One look at all replicas, where somebody has such a limit."""
        limited = self._gate.kv_limits()
        if not limited:
            return
        kept = await self.kept()
        for holder, most in limited:
            await self._hold(holder, most, kept)

    async def kept(self) -> list[tuple[Replica, list[Kept]]]:
        """Of the replicas that tell and answer."""
        found = []
        for replica in self._fleet:
            if isinstance(replica.engine, TellsKept) and replica.healthy:
                try:
                    listed = await replica.engine.kept()
                except EngineError as error:
                    log.warning("a replica does not tell what it keeps", replica=replica.name, reason=str(error))
                    continue
                if listed is not None:
                    found.append((replica, listed))
        return found

    async def _hold(self, holder: Holder, most: int, kept: Sequence[tuple[Replica, list[Kept]]]) -> None:
        theirs = await self._names(holder)
        held = sum(one.bytes for _, listed in kept for one in listed if one.session in theirs)
        if held <= most:
            return
        salt = self._salt_of(holder.tenant_id)
        for replica, listed in kept:
            for one in listed:
                if held <= most:
                    return
                if one.bytes and theirs.get(one.session):
                    try:
                        await replica.engine.forget(one.session, salt)
                    except EngineError as error:
                        log.warning("a replica did not give K/V up", replica=replica.name, reason=str(error))
                        break
                    held -= one.bytes
                    self._forgot()
        log.info("K/V of sessions in use is beyond its limit", holder=str(holder), bytes=held, limit=most)

    async def _names(self, holder: Holder) -> dict[str, bool]:
        """Names of the holder's sessions towards replicas -> whether it is idle."""
        found = await self._store.session_ids(holder, self._clock() - self._idle_s)
        names = {self._name_of(holder.tenant_id, id): idle for id, idle in found.items()}
        return names | {beside(name): idle for name, idle in names.items()}
