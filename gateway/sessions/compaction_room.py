"""What a compaction needs of the gateway, as one value that `gateway.app` wires once; and how it is hurried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.fleet.fleet import Fleet
from gateway.sessions.models import Models
from gateway.sessions.registry import Registry
from gateway.sessions.summariser import Summariser
from gateway.store.sessions import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Haste:
    """How soon a run has to end.

    `pressed`: the next turn will hardly fit; no model is heard any more, and the prefix is prefilled after the commit.
    `waited_for`: a turn waits for the end; nothing is prefilled at all.
    """

    pressed: asyncio.Event = field(default_factory=asyncio.Event)
    waited_for: asyncio.Event = field(default_factory=asyncio.Event)

    def press(self) -> None:
        self.pressed.set()

    def wait_for(self) -> None:
        self.pressed.set()
        self.waited_for.set()

    @property
    def why(self) -> str:
        return "a turn waited" if self.waited_for.is_set() else "the window was nearly full"


@dataclass(frozen=True, slots=True)
class CompactionRoom:
    store: Store
    fleet: Fleet
    models: Models
    registry: Registry
    summariser: Summariser
    new_id: Callable[[str], str]
    session_name: Callable[[str, str], str]
    cache_salt: Callable[[str], str]
    default_max_tokens: int


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None where the event is set before: then it is stopped."""
    if event.is_set():
        work.close()
        return None
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
