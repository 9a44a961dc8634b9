"""Erases a session, or all of an end user's: what runs is stopped, then the rows go, then every place forgets.

    stop -> rows, receipt, what is to be forgotten (one transaction) -> places, as far as they are reached now

A receipt that is `pending` waits for places that are away. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from gateway.sessions.places import Places
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import HandedOver
from gateway.store.audit_records import AuditLine
from gateway.store.erasure_records import Receipt
from gateway.store.records import RunningTurn

STOP_S = 10.0  # for a turn that is told to stop; its lease is then broken by the erasure itself
FOLLOW_S = 0.1  # how often the store is asked whether a turn of another gateway has ended
LEFT_S = 30.0  # an erasure that old whose rows are not gone was left by a gateway that died


async def erase_session(
    room: TurnRoom, places: Places, tenant_id: str, session_id: str, *, line: AuditLine
) -> Receipt | None:
    """The receipt of a session that is gone. None: there is no such session. `line`: for the audit log."""
    await _stop_all(room, await room.store.running_turns(tenant_id, session_id=session_id))
    receipt = await room.store.delete_session(tenant_id, session_id, line=line)
    if receipt is None:
        return None
    return await places.hasten(tenant_id, receipt.id) or receipt


async def erase_user(
    room: TurnRoom, places: Places, tenant_id: str, user_ref: str, subject: str, *, line: AuditLine
) -> Receipt:
    """The receipt of all that an end user's sessions held. Said again while it is not done, the same one goes on.

    `subject`: a keyed digest of the user's name, which the receipt keeps in its place. Raises UnstorableText.
    """
    await room.store.flush_usage()  # what this gateway has still to book of that user
    erasure_id = await room.store.begin_user_erasure(tenant_id, user_ref, subject, line=line)
    await _erase_rows(room, tenant_id, erasure_id, user_ref)
    receipt = await places.hasten(tenant_id, erasure_id)
    assert receipt is not None, "receipts are not deleted"
    return receipt


async def go_on(room: TurnRoom) -> None:
    """Take up erasures by end user that were left half done."""
    for tenant_id, erasure_id in await room.store.unfinished_erasures(room.clock() - LEFT_S):
        user_ref = await room.store.user_of_erasure(tenant_id, erasure_id)
        if user_ref is not None:
            await _erase_rows(room, tenant_id, erasure_id, user_ref)


async def _erase_rows(room: TurnRoom, tenant_id: str, erasure_id: str, user_ref: str) -> None:
    """A few sessions at a time, until none is left; one that begins meanwhile included."""
    while True:
        await _stop_all(room, await room.store.running_turns(tenant_id, user_ref=user_ref))
        if await room.store.erase_of_user(tenant_id, erasure_id) is None:
            return


async def _stop_all(room: TurnRoom, turns: list[RunningTurn]) -> None:
    await asyncio.gather(*(_stop(room, turn) for turn in turns))


async def _stop(room: TurnRoom, turn: RunningTurn) -> None:
    """Have a turn end, here or at another gateway, for at most STOP_S."""
    run = room.registry.of_session(turn.tenant_id, turn.session_id)
    with suppress(TimeoutError, HandedOver):
        async with asyncio.timeout(STOP_S):
            if run is not None:
                run.cancel("session_deleted")
                await run.wait_end()
                return
            await room.store.request_cancel(turn.tenant_id, turn.session_id, turn.turn_id)
            while await room.store.running_turns(turn.tenant_id, session_id=turn.session_id):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(FOLLOW_S)
