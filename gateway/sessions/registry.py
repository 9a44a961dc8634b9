"""The turns that run in this gateway: found by session or id, their leases renewed, their cancel wishes heard.

A lease keeps a session's turns in order across gateways. It is renewed well before it ends; a turn whose lease was
lost stops at once, because its write would be refused by the fence anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from gateway.background import repeated
from gateway.sessions.heads import Heads
from gateway.sessions.offers import OFFER_S, Offers
from gateway.sessions.run import TurnRun
from gateway.store.sessions import Store
from gateway.traces import trace_of

log = structlog.get_logger(__name__)

KEPT_ENDED = 256  # ended turns that can still be followed from memory
STOP_S = 75.0  # turns that were told to stop get this long to be taken over, or to store what they have
POLL_CANCELS_S = 0.4  # a cancel sent to another gateway is heard within half a second

T = TypeVar("T")


class Registry:
    """`owner` is "<gateway name>/<boot epoch>": a restarted gateway is another owner and voids what it left."""

    def __init__(
        self,
        store: Store,
        *,
        owner: str,
        lease_s: float,
        renew_s: float,
        clock: Callable[[], float] = time.time,
        handover_s: float = OFFER_S,
    ) -> None:
        self.owner = owner
        self.heads = Heads(clock)
        self.offers = Offers(store, owner, wait_s=handover_s)
        self._store = store
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._running: dict[str, TurnRun] = {}  # by turn id
        self._by_session: dict[tuple[str, str], TurnRun] = {}
        self._ended: OrderedDict[str, TurnRun] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining: asyncio.Task[None] | None = None
        self.on_ended: Callable[[TurnRun], None] = lambda run: None

    def __len__(self) -> int:
        return len(self._running)

    def add(self, run: TurnRun, task: asyncio.Task[None]) -> None:
        self._running[run.turn_id] = run
        if run.session_id is not None:
            self._by_session[run.tenant_id, run.session_id] = run
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._left(run, done))

    def _left(self, run: TurnRun, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            log.error("a turn failed inside the gateway", turn_id=run.turn_id, trace=trace_of(bug))
        if not run.moved:
            self.on_ended(run)
        self._running.pop(run.turn_id, None)
        if run.session_id is not None and self._by_session.get((run.tenant_id, run.session_id)) is run:
            del self._by_session[run.tenant_id, run.session_id]
        if run.moved:
            return
        self._ended[run.turn_id] = run
        while len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)

    def of_session(self, tenant_id: str, session_id: str) -> TurnRun | None:
        return self._by_session.get((tenant_id, session_id))

    async def see_through(self, work: Coroutine[Any, Any, T], left: Callable[[T], object]) -> T:
        """Await `work`, which goes on to its end also when the caller is cancelled; its result then goes to `left`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else left(done.result()))
            raise

    def find(self, tenant_id: str, turn_id: str, fence: int) -> TurnRun | None:
        """The turn as it runs here under `fence`, or ended here a short while ago.

        Under another fence it is another attempt, perhaps another gateway's: what is remembered here is not of it.
        """
        for run in (self._running.get(turn_id), self._ended.get(turn_id)):
            if run is not None and (run.tenant_id, run.fence) == (tenant_id, fence):
                return run
        return None

    def forget(self, tenant_id: str, session_id: str) -> None:
        """Keep nothing of a deleted session in memory."""
        self.heads.forget(tenant_id, session_id)
        for turn_id in [t for t, r in self._ended.items() if (r.tenant_id, r.session_id) == (tenant_id, session_id)]:
            del self._ended[turn_id]

    def running(self) -> list[TurnRun]:
        return list(self._running.values())

    @property
    def stopping(self) -> bool:
        """No turn begins here any more."""
        return self._draining is not None

    async def drain(self, grace_s: float) -> None:
        """Let running turns finish for at most `grace_s`, then stop the rest: each is handed over to another gateway,
        or ends with its terminal event. Said twice, the first one is waited for.
        """
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(grace_s), name="drain")
        await asyncio.shield(self._draining)

    async def _drain(self, grace_s: float) -> None:
        await self._tasks_end(grace_s)
        for run in self.running():
            run.cancel("gateway_shutdown")
        await self._tasks_end(STOP_S)

    async def _tasks_end(self, within_s: float) -> None:
        """A begin that ends may have started a turn: asked again until none is left."""
        until = time.monotonic() + within_s
        while self._tasks and (left_s := until - time.monotonic()) > 0:
            await asyncio.wait(set(self._tasks), timeout=left_s)

    @asynccontextmanager
    async def leases_kept(self) -> AsyncIterator[None]:
        async with (
            repeated(self._renew, every_s=self._renew_s, name="lease-renewal"),
            repeated(self._hear_cancels, every_s=POLL_CANCELS_S, name="cancel-poll"),
        ):
            yield

    async def _renew(self) -> None:
        """A round that the database missed is made up by the next; a turn that outlives its lease meets the fence."""
        held = [(r.tenant_id, r.session_id, r.fence) for r in self.running() if r.session_id is not None]
        if not held:
            return
        for tenant_id, session_id, fence in await self._store.renew_leases(self.owner, held, self._lease_s):
            run = self.of_session(tenant_id, session_id)
            if run is not None and run.fence == fence:
                run.cancel("lease_lost")

    async def _hear_cancels(self) -> None:
        if not self._by_session:
            return
        for wish in await self._store.cancelled_turns(self.owner):
            run = self._running.get(wish.turn_id)
            if run is not None:
                run.cancel("cancelled")
