"""The turns that run in this gateway: found by session or id, their leases renewed, their cancel wishes heard.

A lease keeps a session's turns in order across gateways. It is renewed well before it ends; a turn whose lease was
lost stops at once, because its write would be refused by the fence anyway.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from gateway.sessions.run import TurnRun
from gateway.store.records import StoreUnavailable
from gateway.store.sessions import Store

log = structlog.get_logger(__name__)

KEPT_ENDED = 256  # ended turns that can still be followed from memory
POLL_CANCELS_S = 0.4  # a cancel sent to another gateway is heard within half a second


class Registry:
    """`owner` is "<gateway name>/<boot epoch>": a restarted gateway is another owner and voids what it left."""

    def __init__(self, store: Store, *, owner: str, renew_s: float) -> None:
        self.owner = owner
        self._store = store
        self._renew_s = renew_s
        self._running: dict[str, TurnRun] = {}  # by turn id
        self._by_session: dict[tuple[str, str], TurnRun] = {}
        self._ended: OrderedDict[str, TurnRun] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
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
            log.error("a turn failed inside the gateway", turn_id=run.turn_id, exc_info=bug)
        self.on_ended(run)
        self._running.pop(run.turn_id, None)
        if run.session_id is not None and self._by_session.get((run.tenant_id, run.session_id)) is run:
            del self._by_session[run.tenant_id, run.session_id]
        self._ended[run.turn_id] = run
        while len(self._ended) > KEPT_ENDED:
            self._ended.popitem(last=False)

    def of_session(self, tenant_id: str, session_id: str) -> TurnRun | None:
        return self._by_session.get((tenant_id, session_id))

    def find(self, tenant_id: str, turn_id: str) -> TurnRun | None:
        """A turn that runs here, or ended here a short while ago."""
        run = self._running.get(turn_id) or self._ended.get(turn_id)
        return run if run is not None and run.tenant_id == tenant_id else None

    def forget(self, tenant_id: str, session_id: str) -> None:
        """Keep nothing of a deleted session in memory."""
        for turn_id in [t for t, r in self._ended.items() if (r.tenant_id, r.session_id) == (tenant_id, session_id)]:
            del self._ended[turn_id]

    def running(self) -> list[TurnRun]:
        return list(self._running.values())

    async def drain(self, grace_s: float) -> None:
        """Let running turns finish for at most `grace_s`, then stop the rest; each ends with its terminal event."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_s)
        for run in self.running():
            run.cancel("gateway_shutdown")
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=10.0)

    @asynccontextmanager
    async def leases_kept(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._renew_forever(), name="lease-renewal"),
            asyncio.create_task(self._hear_cancels(), name="cancel-poll"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            held = [(r.tenant_id, r.session_id, r.fence) for r in self.running() if r.session_id is not None]
            if not held:
                continue
            try:
                lost = await self._store.renew_leases(self.owner, held)
            except StoreUnavailable:
                continue  # tried again in a moment; a turn that outlives its lease is refused by the fence
            for tenant_id, session_id, fence in lost:
                run = self.of_session(tenant_id, session_id)
                if run is not None and run.fence == fence:
                    run.cancel("lease_lost")

    async def _hear_cancels(self) -> None:
        while True:
            await asyncio.sleep(POLL_CANCELS_S)
            if not self._by_session:
                continue
            try:
                wished = await self._store.cancelled_turns(self.owner)
            except StoreUnavailable:
                continue
            for wish in wished:
                run = self._running.get(wish.turn_id)
                if run is not None:
                    run.cancel("cancelled")
