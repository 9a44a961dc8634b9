"""What a turn needs of the gateway, as one value that `gateway.app` wires once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.fleet.fleet import Fleet
from gateway.limits.gate import Gate
from gateway.sessions.compaction import Compactions
from gateway.sessions.models import Models
from gateway.sessions.registry import Registry
from gateway.sessions.run import HandedOver
from gateway.sessions.shared_prompts import SharedPrompts
from gateway.store.sessions import Store


@dataclass(frozen=True, slots=True)
class TurnRoom:
    """What a turn needs of the gateway, wired once."""

    store: Store
    fleet: Fleet
    models: Models
    registry: Registry
    clock: Callable[[], float]  # seconds since 1970
    new_id: Callable[[str], str]  # "turn" -> "turn_…"
    session_name: Callable[[str, str], str]  # (tenant, session) -> the name towards replicas
    cache_salt: Callable[[str], str]  # tenant -> salt
    lease_s: float
    max_output_tokens: int
    compactions: Compactions
    gate: Gate
    without_database: bool = False  # whether chats are answered unsaved while the database is away
    prompts: SharedPrompts = field(default_factory=SharedPrompts)

    async def forget(self, tenant_id: str, session_id: str) -> bool:
        """Keep nothing of a deleted session in memory -> whether something worked on it, which is stopped now."""
        run = self.registry.of_session(tenant_id, session_id)
        if run is not None:
            run.cancel("session_deleted")
            with suppress(HandedOver):
                await run.wait_end()
        tasks = self.compactions.forget(tenant_id, session_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        self.registry.forget(tenant_id, session_id)
        self.prompts.forget(session_id)
        return run is not None or bool(tasks)
