"""New sessions, within the limits of who makes them."""

from __future__ import annotations

from dataclasses import replace

from gateway.api.state import Gateway
from gateway.store.records import NewSession, SessionRecord, TooManySessions
from gateway.tenancy import Identity


def limited(gateway: Gateway, caller: Identity, new: NewSession) -> NewSession:
    """With the key that makes it, and what it has to fit."""
    return replace(new, key_id=caller.key_id, bounds=gateway.room.gate.bounds(caller.tenant_id, caller.key_id))


async def create(gateway: Gateway, caller: Identity, new: NewSession) -> SessionRecord:
    """Raises DuplicateId, Forbidden (too many sessions, too many bytes)."""
    await gateway.room.gate.check_stored(caller.tenant_id, caller.key_id)
    try:
        return await gateway.store.create_session(limited(gateway, caller, new))
    except TooManySessions as error:
        raise gateway.room.gate.no_session(error) from error
