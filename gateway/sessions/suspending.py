"""A session's K/V put down where it lies, taken up there, or carried to another replica; the session is not touched.

Where its K/V lies says its pin. Nothing here is necessary: whatever is refused or fails, the next turn computes.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from engines.contract import EngineError, KeepsKv, RequestRefused
from gateway.errors import Conflict, SessionBusy, UpstreamFailed
from gateway.fleet.replica import Replica
from gateway.sessions.history import load
from gateway.sessions.homes import known, standing_pin
from gateway.sessions.room import TurnRoom
from gateway.store.records import HEAD, SessionRecord


async def suspend(room: TurnRoom, session: SessionRecord) -> dict[str, Any]:
    """Off the device of its replica -> replica, tier, tokens, blocks, bytes. Raises SessionBusy, Conflict,
    UpstreamFailed."""
    return await _ask(room, session, "suspend")


async def resume(room: TurnRoom, session: SessionRecord) -> dict[str, Any]:
    """To where its next turn takes it from -> replica, tokens, blocks by tier. Raises as `suspend`."""
    return await _ask(room, session, "resume")


async def carry(old: Replica | None, new: Replica, *, model: str, session: str, salt: str) -> bool:
    """From one replica to another, if both can and serve the same weights; False where nothing came of it."""
    if old is None or not _carries(old, new, model):
        return False
    assert isinstance(old.engine, KeepsKv)
    assert isinstance(new.engine, KeepsKv)
    try:
        async with aclosing(old.engine.kv_out(session, salt)) as file:
            await new.engine.kv_in(session, salt, file)
    except EngineError:
        return False  # the path is computed there, as ever
    return True


def _carries(old: Replica, new: Replica, model: str) -> bool:
    for replica in (old, new):
        if replica.capabilities is None or not replica.capabilities.carries_kv:
            return False
        if not isinstance(replica.engine, KeepsKv):
            return False
    assert old.capabilities is not None
    assert new.capabilities is not None
    weights = old.capabilities.fingerprints.get(model)
    return weights is not None and weights == new.capabilities.fingerprints.get(model)


async def _ask(room: TurnRoom, session: SessionRecord, what: str) -> dict[str, Any]:
    if session.status == "running":
        raise SessionBusy("the session has a turn that runs")
    replica = await _home(room, session)
    assert isinstance(replica.engine, KeepsKv)
    name, salt = room.session_name(session.tenant_id, session.id), room.cache_salt(session.tenant_id)
    try:
        told = await (replica.engine.suspend if what == "suspend" else replica.engine.resume)(name, salt)
    except RequestRefused as error:
        if error.code == "session_busy":
            raise SessionBusy("the session has a turn that runs") from None
        raise Conflict(f"its replica refuses: {error}", code=error.code) from None
    except EngineError as error:
        raise UpstreamFailed(f"its replica does not answer: {error}") from None
    shown = ("tier", "tokens", "blocks", "bytes", "device", "host", "disk")
    return {"id": session.id, "replica": replica.name} | {key: told[key] for key in shown if key in told}


async def _home(room: TurnRoom, session: SessionRecord) -> Replica:
    """The replica that its K/V lies at, if that can put it down."""
    history = await load(room.store, session, HEAD)
    await known(history, room.fleet)
    pin = standing_pin(history, room.fleet)
    replica = room.fleet.get(pin.replica) if pin is not None else None
    if replica is None:
        raise Conflict("no replica keeps K/V of this session", code="not_cached")
    if replica.capabilities is None or not replica.capabilities.suspends or not isinstance(replica.engine, KeepsKv):
        raise Conflict(f"replica {replica.name} cannot put a session's K/V down", code="unsupported")
    return replica
