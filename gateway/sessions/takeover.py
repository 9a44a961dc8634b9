"""Takes what other gateways offer as they stop, and goes on with it here: `take_offers` is one look."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import orjson
import structlog

from gateway.sessions.handover import Handover, readable, speaks, take_up
from gateway.sessions.room import TurnRoom
from gateway.sessions.run import Stored, TurnEvent, TurnRun, TurnStarted
from gateway.sessions.work import TurnWork
from gateway.store.handovers import Taken
from gateway.traces import trace_of

AT_ONCE = 16  # taken by one transaction: they run, and their leases are renewed, before the next are taken

log = structlog.get_logger(__name__)


async def take_offers(room: TurnRoom) -> None:
    """Take the turns that this gateway can go on with. One that cannot be gone on with ends with its lease."""
    if room.registry.stopping:
        return
    offers = await room.store.offered_turns(room.registry.owner)
    read = [(offer, handover) for offer in offers if (handover := readable(offer)) is not None]
    wanted = [(offer, handover) for offer, handover in read if speaks(room, handover)]
    for start in range(0, len(wanted), AT_ONCE):
        some = {offer.turn_id: (offer, handover) for offer, handover in wanted[start : start + AT_ONCE]}
        taken = await room.store.take_turns(room.registry.owner, [offer for offer, _ in some.values()], room.lease_s)
        begun = (_go_on(room, one, some[one.offer.turn_id][1]) for one in taken)
        for one, failed in zip(taken, await asyncio.gather(*begun, return_exceptions=True), strict=True):
            if failed is not None:
                why = trace_of(failed)
                log.error("a turn that was taken over does not go on", turn_id=one.offer.turn_id, trace=why)


async def _go_on(room: TurnRoom, taken: Taken, handover: Handover) -> None:
    offer = taken.offer
    record = await room.store.get_turn(offer.tenant_id, offer.session_id, offer.turn_id)
    if record is None or record.fence != taken.fence:
        return  # its session was deleted
    up = await take_up(room, handover, record)
    run = TurnRun(
        offer.turn_id,
        tenant_id=offer.tenant_id,
        session_id=offer.session_id,
        on_disconnect=record.on_disconnect,
    )
    run.fence = taken.fence
    work = TurnWork.taken_up(room, up, run, record)
    if handover.admission is not None:
        await room.gate.adopt(handover.admission)
    told: list[TurnEvent] = list(work.told)
    if handover.stored_events:
        stored = await room.store.read_events(offer.tenant_id, offer.session_id, offer.turn_id, 0)
        assert len(stored) == handover.num_events, "all events are stored before a turn is offered"
        run.events += [Stored(str(_type(event)), event) for _, event in stored]
    else:
        meta = work.metadata(work.placement)
        run.events += [
            TurnStarted(run.turn_id, run.session_id, work.seq, record.model, record.created_at, meta),
            *told,
        ]
    room.registry.add(run, asyncio.create_task(work.run_to_end(), name=f"turn-{run.turn_id}"))
    if taken.cancelled:
        run.cancel("cancelled")


def _type(event: bytes) -> object:
    told: Mapping[str, object] = orjson.loads(event)
    return told["type"]
