"""The turns that this gateway offers to others as it stops: all that come together in one transaction, one look a
moment for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import structlog

from gateway.store.handovers import Offer
from gateway.store.records import StoreUnavailable
from gateway.store.sessions import Store

OFFER_S = 5.0  # it waits this long for one of its turns to be taken, and again after each that was,
MOST_S = 60.0  # but no longer than this
LOOK_S = 0.15
STORE_S = 10.0  # a database that does not take the offers in this time takes none

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Offered:
    offer: Offer
    stored: asyncio.Event = field(default_factory=asyncio.Event)  # or refused
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    refused: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.offer.tenant_id, self.offer.turn_id


class Offers:
    """`wait_s`: how long for somebody to take one; 0: nothing is offered."""

    def __init__(self, store: Store, owner: str, *, wait_s: float = OFFER_S) -> None:
        self._store = store
        self._owner = owner
        self._wait_s = wait_s
        self._waiting: list[_Offered] = []
        self._looking: asyncio.Task[None] | None = None
        self._taken_at = 0.0  # when one was taken, seconds

    async def taken(self, offer: Offer) -> bool:
        """Offer a turn until somebody has taken it. False: nobody came, and it is this gateway's again, if it was.

        Raises StoreUnavailable.
        """
        if self._wait_s <= 0:
            return False
        one = _Offered(offer)
        self._waiting.append(one)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="offers")
        try:
            await _within(one.stored, STORE_S)
            began = time.monotonic()
            while one.stored.is_set() and not one.refused and not one.taken.is_set():
                left_s = min(max(began, self._taken_at) + self._wait_s, began + MOST_S) - time.monotonic()
                if left_s <= 0:
                    break
                await _within(one.taken, min(left_s, 1.0))
        finally:
            self._waiting.remove(one)
        if one.taken.is_set():
            return True
        if one.refused:
            return False
        back = await self._store.take_back_turn(*one.key, offer.fence)
        log.warning("nobody took a turn over", turn_id=offer.turn_id, stored=one.stored.is_set())
        return one.stored.is_set() and not back

    async def _look(self) -> None:
        while self._waiting:
            await asyncio.sleep(LOOK_S)
            new = [one for one in self._waiting if not one.stored.is_set()]
            old = [one for one in self._waiting if one.stored.is_set() and not one.refused]
            try:
                if new:
                    held = await self._store.offer_turns([one.offer for one in new])
                    for one in new:
                        one.refused = one.offer.turn_id not in held
                        one.stored.set()
                offered = await self._store.still_offered(self._owner) if old else set()
            except StoreUnavailable as error:
                log.warning("the turns to hand over wait for the database", reason=str(error))
                continue
            for one in old:
                if one.key not in offered:
                    one.taken.set()
                    self._taken_at = time.monotonic()
        self._looking = None


async def _within(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
