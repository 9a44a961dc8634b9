"""Work that is done again and again while the gateway serves. One bad round never ends it: leases depend on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from gateway.store.records import StoreUnavailable

log = structlog.get_logger(__name__)


@asynccontextmanager
async def repeated(work: Callable[[], Awaitable[None]], *, every_s: float, name: str) -> AsyncIterator[None]:
    """Await `work` every `every_s` seconds while the context is open; what a round raises is logged."""
    task = asyncio.create_task(_forever(work, every_s, name), name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _forever(work: Callable[[], Awaitable[None]], every_s: float, name: str) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await work()
        except StoreUnavailable as error:
            log.warning("background work waits for the database", work=name, reason=str(error))
        except Exception:  # logged with its traceback; the next round must come
            log.exception("a round of background work failed", work=name)
