"""Who is let through: a turn asks here after it is known what it takes, and before anything of it is saved.

    admit   quotas -> requests a minute -> tokens a minute, as many as it may use -> a slot; refused: all given back
    end     tokens corrected to what they were, the slot free

With no limit set it is one look into an empty dict.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog

from gateway.background import repeated
from gateway.errors import GatewayError, Unavailable
from gateway.limits import refusals
from gateway.limits.admission import Admission
from gateway.limits.counters import Counters, window_of
from gateway.limits.quotas import Quotas
from gateway.limits.told import Quota, Told
from gateway.limits.windows import Taken
from gateway.store.limit_records import TENANT, Bound, Holder, Limits, TooManySessions
from gateway.store.records import StoreUnavailable
from gateway.store.sessions import Store
from gateway.store.usage_records import month_end

log = structlog.get_logger(__name__)

REFRESH_S = 1.0  # a limit that was changed at another gateway holds here within this time
PATIENCE_S = 2.0  # where counters are does not answer for so long: it is gone
SWEEP_S = 60.0

Held = tuple[Holder, Limits]


class Gate:
    """`refused` hears the name of each limit that refused somebody, `blind` of each time that nothing could be counted.
    `blind_refuses`: what then becomes of the request."""

    def __init__(
        self,
        store: Store,
        counters: Counters,
        *,
        clock: Callable[[], float],
        renew_s: float,
        blind_refuses: bool = False,
        refused: Callable[[str], object] = lambda name: None,
        blind: Callable[[], object] = lambda: None,
    ) -> None:
        self._store = store
        self._counters = counters
        self._gone: tuple[type[Exception], ...] = (StoreUnavailable, TimeoutError, *counters.gone)
        self._clock = clock
        self._renew_s = renew_s
        self._blind_refuses = blind_refuses
        self._refused = refused
        self._blind = blind
        self._limits: dict[Holder, Limits] = {}
        self._stamp = (0, 0)
        self._quotas = Quotas(store, clock)
        self._held: dict[str, Admission] = {}  # with a slot
        self._freed: set[str] = set()  # since the last look at which slots to hold
        self._over_until: dict[Holder, float] = {}  # no request of theirs fits before, by time.monotonic
        self._tasks: set[asyncio.Task[None]] = set()
        self._sees = True  # whether counters answered last

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Limits are read, and slots held, until it closes; what ends then is given back before."""
        await self.refresh()
        async with (
            repeated(self.refresh, every_s=REFRESH_S, name="limits"),
            repeated(self._hold, every_s=self._renew_s, name="limit-slots"),
            repeated(self._sweep, every_s=SWEEP_S, name="limit-counters"),
        ):
            yield
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE_S)

    async def refresh(self) -> None:
        """The limits as the database has them."""
        stamp = await self._store.limits_stamp()
        if stamp != self._stamp:
            found = await self._store.list_limits()
            self._limits = {Holder(one.tenant_id, one.key_id): one.limits for one in found}
            self._stamp = stamp
            self._over_until.clear()
            self._quotas.forget()

    def limits_of(self, tenant_id: str, key_id: str) -> list[Held]:
        """The tenant's, and the key's."""
        if not self._limits:
            return []
        holders = (Holder(tenant_id, TENANT), Holder(tenant_id, key_id))
        return [(holder, self._limits[holder]) for holder in holders if holder in self._limits]

    def kv_limits(self) -> list[tuple[Holder, int]]:
        """Who has one, and which."""
        return [(holder, most) for holder, limits in self._limits.items() if (most := limits.kv_bytes) is not None]

    def bounds(self, tenant_id: str, key_id: str) -> tuple[Bound, ...]:
        """What a new session must fit."""
        held = self.limits_of(tenant_id, key_id)
        return tuple(Bound(holder, limits.sessions) for holder, limits in held if limits.sessions is not None)

    def no_session(self, error: TooManySessions) -> GatewayError:
        """What is told of a session that the store refused."""
        return self._refusal(refusals.sessions(error))

    async def check_stored(self, tenant_id: str, key_id: str) -> None:
        """Before something is stored that is no turn. Raises Forbidden, Unavailable."""
        if held := self.limits_of(tenant_id, key_id):
            await self._counted(self._check_stored(held))

    async def admit(self, tenant_id: str, key_id: str, tokens: int, told: Told | None = None) -> Admission | None:
        """Let a turn through that uses at most `tokens`; it is to be ended, or given back. None: there is no limit.

        Raises RateLimited, Forbidden, Unavailable (counters are gone, and the settings say to refuse then).
        """
        held = self.limits_of(tenant_id, key_id)
        if not held:
            return None
        admission = Admission(secrets.token_hex(12), tokens)
        told = told or Told()
        try:
            await self._counted(self._admit(held, admission, told))
        except GatewayError:
            self._soon(self._give_back(admission))
            raise
        self._count_month(held, admission)
        if admission.slots:
            self._held[admission.id] = admission
        return admission

    async def adopt(self, admission: Admission) -> None:
        """Go on with a turn that another gateway let through."""
        self._held[admission.id] = admission
        for holder in admission.months:
            self._quotas.begun(holder, admission.tokens)
        if admission.slots:
            await self._counted(self._counters.slots.hold([(holder, admission.id) for holder in admission.slots]))

    def end(self, admission: Admission | None, used: int) -> None:
        """The turn is over, and used that many tokens. Returns at once."""
        if admission is not None:
            self._leave(admission, used)
            self._soon(self._settle(admission, used))

    def give_back(self, admission: Admission | None) -> None:
        """The turn did not begin."""
        if admission is not None:
            self._leave(admission, 0)
            self._soon(self._give_back(admission))

    def hand_over(self, admission: Admission | None) -> None:
        """Another gateway goes on with the turn, and adopts this."""
        if admission is not None:
            self._leave(admission, 0)
            if not self._counters.slots.shared:
                self._soon(self._free(admission))

    def _leave(self, admission: Admission, used: int) -> None:
        self._held.pop(admission.id, None)
        for holder in admission.months:
            self._quotas.ended(holder, admission.tokens, used)

    # ---- what is asked of the counters

    async def _admit(self, held: Sequence[Held], admission: Admission, told: Told) -> None:
        await self._check_month(held, admission.tokens)
        await self._check_stored(held)
        for holder, limits in held:
            if limits.requests_per_minute is not None:
                over_s = self._over_until.get(holder, 0.0) - time.monotonic()
                if over_s > 0:
                    told.note("requests", Quota(limits.requests_per_minute, 0, over_s))
                    told.note("requests", Quota(limits.requests_per_minute, 0, over_s))
                    raise self._refusal(refusals.requests(holder, limits.requests_per_minute, over_s))
                await self._take("requests", holder, limits.requests_per_minute, 1, admission.requests, told)
        for holder, limits in held:
            if limits.tokens_per_minute is not None:
                allowed = limits.tokens_per_minute
                await self._take("tokens", holder, allowed, admission.tokens, admission.windows, told)
        wanted = [(holder, most) for holder, limits in held if (most := limits.concurrent_turns) is not None]
        if wanted:
            full = await self._counters.slots.take(wanted, admission.id)
            if full is not None:
                holder, taken = full
                raise self._refusal(refusals.concurrent(holder, dict(wanted)[holder], taken))
            admission.slots.extend(holder for holder, _ in wanted)

    async def _take(self, kind: str, holder: Holder, limit: int, amount: int, into: list[Taken], told: Told) -> None:
        taken, standing = await self._counters.windows.take(f"{kind}/{holder}", limit, amount)
        told.note(kind, Quota(limit, standing.remaining(limit), standing.reset_s))
        if taken is not None:
            into.append(taken)
            return
        wait_s = standing.wait_s(limit, amount)
        if kind == "tokens":
            raise self._refusal(refusals.tokens(holder, limit, standing.used, amount, wait_s))
        if wait_s is not None:
            self._over_until[holder] = time.monotonic() + wait_s
        raise self._refusal(refusals.requests(holder, limit, wait_s))

    async def _check_month(self, held: Sequence[Held], tokens: int) -> None:
        for holder, limits in held:
            if limits.month_tokens is None:
                continue
            used = await self._quotas.month_tokens(holder)
            if used + tokens > limits.month_tokens:
                over_s = month_end(self._clock()) - self._clock()
                raise self._refusal(refusals.month(holder, limits.month_tokens, used, tokens, over_s))

    async def _check_stored(self, held: Sequence[Held]) -> None:
        for holder, limits in held:
            if limits.stored_bytes is None:
                continue
            stored = await self._quotas.stored_bytes(holder)
            if stored >= limits.stored_bytes:
                raise self._refusal(refusals.stored(holder, limits.stored_bytes, stored))

    def _refusal(self, refusal: refusals.Refusal) -> GatewayError:
        self._refused(refusal.limit)
        return refusal.error

    def _count_month(self, held: Sequence[Held], admission: Admission) -> None:
        for holder, limits in held:
            if limits.month_tokens is not None:
                self._quotas.begun(holder, admission.tokens)
                admission.months.append(holder)

    async def _counted(self, work: Coroutine[Any, Any, None]) -> None:
        """Where the counters are gone: let through, told, and counted as such; or refused, by the settings."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work
        except self._gone as error:
            self._blind()
            if self._sees:
                log.warning("limits cannot be counted", refused=self._blind_refuses, reason=str(error)[:200])
            self._sees = False
            if self._blind_refuses:
                raise Unavailable(
                    "limits cannot be counted now", code="limits_unavailable", retry_after_s=1.0
                ) from error
            return
        if not self._sees:
            log.info("limits are counted again")
        self._sees = True

    # ---- what is given back

    async def _settle(self, admission: Admission, used: int) -> None:
        for taken in admission.windows:
            await self._counters.windows.correct(taken, used)
        await self._free(admission)

    async def _give_back(self, admission: Admission) -> None:
        for taken in (*admission.requests, *admission.windows):
            await self._counters.windows.correct(taken, 0)
        await self._free(admission)

    async def _free(self, admission: Admission) -> None:
        if admission.slots:
            self._freed.add(admission.id)
            await self._counters.slots.free(admission.slots, admission.id)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._quietly(work), name="limits-given-back")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except self._gone as error:
            log.warning("what a turn held of its limits is free when it lapses", reason=str(error)[:200])

    async def _hold(self) -> None:
        """Slots of turns that still run. One that was freed while it was being held is freed again."""
        self._freed.clear()
        held = [admission for admission in self._held.values() if admission.slots]
        if not held or not self._counters.slots.shared:
            return
        await self._counters.slots.hold([(holder, one.id) for one in held for holder in one.slots])
        for admission in held:
            if admission.id in self._freed:
                await self._free(admission)

    async def _sweep(self) -> None:
        await self._store.sweep_counts(window_of(self._clock()) - 2)
