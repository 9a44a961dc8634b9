"""Turns that a gateway which stops offers to the others: offered, taken by one of them, or taken back.

offer      the row, while its gateway still holds the lease     running, fence n
take       the row goes, the lease changes hands                running, fence n + 1
take back  the row goes, and nobody had taken it                running, fence n
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, delete, select, update

from gateway.store.access import Access
from gateway.store.live import lock_sessions
from gateway.store.tables import handovers, sessions, turns

MOST = 64  # offers read at once


@dataclass(frozen=True, slots=True)
class Offer:
    """A running turn, and what it takes to go on with it. `state` is the gateway's own."""

    tenant_id: str
    session_id: str
    turn_id: str
    fence: int
    owner: str  # who offers it
    state: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    offer: Offer
    fence: int  # under which it runs now
    cancelled: bool  # somebody asked to stop it meanwhile


class HandoverStore(Access):
    async def offer_turns(self, offers: Sequence[Offer]) -> set[str]:
        """Ids of the turns that are offered now: those that their gateway still holds."""
        return await self._write(partial(_offer, offers=offers, now=self._clock()))

    async def offered_turns(self, owner: str) -> list[Offer]:
        """What others than `owner` offer, the oldest first."""
        return await self._read(partial(_offered, owner=owner))

    async def take_turns(self, owner: str, offers: Sequence[Offer], lease_s: float) -> list[Taken]:
        """Those of `offers` that are `owner`'s now: not one that was taken, taken back, ended or lapsed meanwhile."""
        return await self._write(partial(_take, owner=owner, offers=offers, until=self._clock() + lease_s))

    async def take_back_turn(self, tenant_id: str, turn_id: str, fence: int) -> bool:
        """Offer it no more. False: somebody has taken it."""
        return await self._write(partial(_take_back, tenant_id=tenant_id, turn_id=turn_id, fence=fence))

    async def still_offered(self, owner: str) -> set[tuple[str, str]]:
        """(tenant, turn) of what `owner` offers."""
        return await self._read(partial(_standing, owner=owner))

    async def purge_handovers(self, before: float) -> int:
        """Delete offers made before `before`, seconds since 1970, which nobody came for; how many."""
        return await self._write(lambda c: c.execute(delete(handovers).where(handovers.c.created_at < before)).rowcount)


def _offer(connection: Connection, offers: Sequence[Offer], now: float) -> set[str]:
    live = lock_sessions(connection, ((offer.tenant_id, offer.session_id) for offer in offers))
    held: set[str] = set()
    for offer in offers:
        session = live.get((offer.tenant_id, offer.session_id))
        if session is None or (session.fence, session.running) != (offer.fence, offer.turn_id):
            continue
        mine = (handovers.c.tenant_id == offer.tenant_id, handovers.c.turn_id == offer.turn_id)
        connection.execute(delete(handovers).where(*mine))
        connection.execute(
            handovers.insert().values(
                tenant_id=offer.tenant_id,
                turn_id=offer.turn_id,
                session_id=offer.session_id,
                fence=offer.fence,
                owner=offer.owner,
                created_at=now,
                state=offer.state,
            )
        )
        held.add(offer.turn_id)
    return held


def _offered(connection: Connection, owner: str) -> list[Offer]:
    rows = connection.execute(
        select(
            handovers.c.tenant_id,
            handovers.c.session_id,
            handovers.c.turn_id,
            handovers.c.fence,
            handovers.c.owner,
            handovers.c.state,
        )
        .where(handovers.c.owner != owner)
        .order_by(handovers.c.created_at)
        .limit(MOST)
    )
    return [Offer(*row[:5], bytes(row.state)) for row in rows]


def _take(connection: Connection, owner: str, offers: Sequence[Offer], until: float) -> list[Taken]:
    live = lock_sessions(connection, ((offer.tenant_id, offer.session_id) for offer in offers))
    taken: list[Taken] = []
    for offer in offers:
        session = live.get((offer.tenant_id, offer.session_id))
        if session is None or (session.fence, session.running) != (offer.fence, offer.turn_id):
            continue
        if not _take_back(connection, offer.tenant_id, offer.turn_id, offer.fence):
            continue
        fence = offer.fence + 1
        connection.execute(
            update(sessions)
            .where(sessions.c.tenant_id == offer.tenant_id, sessions.c.id == offer.session_id)
            .values(fence=fence, lease_owner=owner, lease_until=until)
        )
        connection.execute(
            update(turns).where(turns.c.tenant_id == offer.tenant_id, turns.c.id == offer.turn_id).values(fence=fence)
        )
        taken.append(Taken(offer, fence, bool(session.cancel)))
    return taken


def _take_back(connection: Connection, tenant_id: str, turn_id: str, fence: int) -> bool:
    gone = connection.execute(
        delete(handovers).where(
            handovers.c.tenant_id == tenant_id, handovers.c.turn_id == turn_id, handovers.c.fence == fence
        )
    )
    return gone.rowcount > 0


def _standing(connection: Connection, owner: str) -> set[tuple[str, str]]:
    rows = connection.execute(select(handovers.c.tenant_id, handovers.c.turn_id).where(handovers.c.owner == owner))
    return {(row.tenant_id, row.turn_id) for row in rows}
