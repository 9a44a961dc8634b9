"""Compactions of a session: plan, make, see, take back; and turns that stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from compression.plan import NoPlan, Plan
from gateway.api.access import needs
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.schemas import Compact, CompactionList, CompactionShape, TurnShape
from gateway.api.sessions import json_response, session_of
from gateway.api.shapes import compaction_json, turn_json
from gateway.api.state import Gateway, gateway_of
from gateway.api.streams import Awaited, EventStream, event
from gateway.api.turns import turn_of
from gateway.errors import Conflict, NotFound
from gateway.sessions.compaction import Idle, Outcome
from gateway.sessions.recognise import SESSION_KEY
from gateway.sessions.snapshot import take
from gateway.store.compaction_records import CompactionRecord
from gateway.store.records import SessionRecord
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["Compaction"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
PIN_SHARE = 0.5  # of the window: system prompt, tools and pinned turns may take so much
FOLLOW_S = 0.5  # how often the store is asked for news
EVENT_OF = {"running": "started", "committed": "completed", "skipped": "skipped", "reverted": "reverted"}


def _planned(session: SessionRecord, status: str, plan: Plan | NoPlan | None, **more: Any) -> dict[str, Any]:
    """What came of it where there is no row: a dry run's plan, or why nothing was done."""
    told = plan.as_json() if plan is not None else {}
    return {"object": "compaction", "session_id": session.id, "status": status, "plan": told, **more}


@router.post(
    "/compact",
    summary="Compact now, or only plan it",
    response_model=None,
    responses=answers(200, CompactionShape, errors=(400, 404, 409, 413, 415)),
    openapi_extra=body_of(Compact, required=False),
)
async def compact(request: Request, caller: Caller, session_id: str) -> Response:
    """`dry_run` shows the plan with its prices, and changes nothing. A session with a turn under way can be compacted:
    the turn goes on as it began. `status` skipped: there was nothing to gain, and `plan` has the numbers."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, empty=True)
    asked = validated(Compact, raw)
    session = await session_of(gateway, caller, session_id)

    async def answer() -> Response:
        work = gateway.room.compactions.ask(session, strategy=asked.strategy, dry_run=bool(asked.dry_run))
        return json_response(_told(session, await work))

    return Awaited(answer)


def _told(session: SessionRecord, outcome: Outcome | Plan | NoPlan) -> dict[str, Any]:
    if isinstance(outcome, CompactionRecord):
        return compaction_json(outcome)
    if isinstance(outcome, Idle):
        return _planned(session, "skipped", outcome.plan, reason=outcome.reason)
    if isinstance(outcome, NoPlan):
        return _planned(session, "skipped", outcome, reason=outcome.reason)
    return _planned(session, "planned", outcome)


@router.get(
    "/compactions",
    summary="What was compacted, when, why and at what price",
    response_model=None,
    responses=answers(200, CompactionList, errors=(400, 404)),
)
async def list_compactions(
    request: Request,
    caller: Caller,
    session_id: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    before: Annotated[int | None, Query(ge=0, lt=2**53, description="Only those with a smaller number.")] = None,
) -> Response:
    """Newest first; also those that failed, and those that were not worth it."""
    gateway = gateway_of(request)
    await session_of(gateway, caller, session_id)
    found = await gateway.store.list_compactions(caller.tenant_id, session_id, limit=limit + 1, before=before)
    data = [compaction_json(record) for record in found[:limit]]
    return json_response({"object": "list", "data": data, "has_more": len(found) > limit})


@router.get(
    "/compactions/stream",
    summary="Follow a session's compactions",
    response_model=None,
    responses=answers(200, None, media_type="text/event-stream", errors=(404,)),
)
async def stream_compactions(
    request: Request,
    caller: Caller,
    session_id: str,
    after: Annotated[int, Query(ge=0, lt=2**53, description="The last number seen.")] = 0,
) -> Response:
    """`session.compaction.started`, `.completed`, `.failed`, `.skipped`, `.reverted`, wherever it runs; the event's id
    is the compaction's number. The stream goes on until the client leaves or the session is deleted."""
    gateway = gateway_of(request)
    await session_of(gateway, caller, session_id)
    return EventStream(
        _followed(gateway, caller.tenant_id, session_id, after), heartbeat_s=gateway.settings.heartbeat_s
    )


async def _followed(gateway: Gateway, tenant_id: str, session_id: str, after: int) -> AsyncGenerator[bytes, None]:
    seen: dict[int, str] = {}
    while await gateway.store.get_session(tenant_id, session_id) is not None:
        news = [
            record
            for record in reversed(await gateway.store.list_compactions(tenant_id, session_id, limit=100))
            if record.number > after and seen.get(record.number) != record.status
        ]
        told = []
        for record in news:
            if record.status in ("committed", "failed") and record.number not in seen:
                told.append(_event(record, "started"))
            seen[record.number] = record.status
            told.append(_event(record, EVENT_OF.get(record.status, record.status)))
        yield b"".join(told) or b": none yet\n\n"
        await asyncio.sleep(FOLLOW_S)


def _event(record: CompactionRecord, what: str) -> bytes:
    kind = f"session.compaction.{what}"
    shown = compaction_json(record)
    for name in ("segments", "elisions"):
        del shown[name]
    return event(orjson.dumps({"type": kind, "compaction": shown}), name=kind, id=record.number)


async def _compaction_of(gateway: Gateway, caller: Identity, session_id: str, id: str) -> CompactionRecord:
    await session_of(gateway, caller, session_id)
    record = None
    if SESSION_KEY.fullmatch(id):
        record = await gateway.store.get_compaction(caller.tenant_id, session_id, id)
    if record is None:
        raise NotFound(f"no compaction {id[:64]!r} in this session", code="compaction_not_found", param="compaction")
    return record


@router.get(
    "/compactions/{compaction}",
    summary="One compaction",
    response_model=None,
    responses=answers(200, CompactionShape, errors=(404,)),
)
async def get_compaction(request: Request, caller: Caller, session_id: str, compaction: str) -> Response:
    return json_response(compaction_json(await _compaction_of(gateway_of(request), caller, session_id, compaction)))


@router.post(
    "/compactions/{compaction}/revert",
    summary="Take a compaction back",
    response_model=None,
    responses=answers(200, CompactionShape, errors=(404, 409)),
)
async def revert(request: Request, caller: Caller, session_id: str, compaction: str) -> Response:
    """The turns stand again as they were, at the next turn; those compactions that build on it go with it."""
    gateway = gateway_of(request)
    record = await _compaction_of(gateway, caller, session_id, compaction)
    try:
        reverted = await gateway.store.revert_compaction(caller.tenant_id, session_id, record.id)
    except ValueError:
        why = f"the compaction is {record.status}: only a committed one can be taken back"
        raise Conflict(why, code="compaction_not_committed") from None
    gateway.registry.heads.forget(caller.tenant_id, session_id)
    if reverted is None:
        raise NotFound(f"no compaction {compaction[:64]!r} in this session", code="compaction_not_found")
    return json_response(compaction_json(reverted))


@router.put(
    "/turns/{turn}/pin",
    summary="Keep a turn as it is, whatever is compacted",
    response_model=None,
    responses=answers(200, TurnShape, errors=(404, 409)),
)
async def pin(request: Request, caller: Caller, session_id: str, turn: str) -> Response:
    """A turn that a summary covers already stands whole again from the next turn on."""
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    record = await turn_of(gateway, session, turn)
    if not record.pinned:
        await _check_pin_budget(gateway, session, record.turn.id)
    return await _pinned(gateway, session, record.turn.id, True)


@router.delete(
    "/turns/{turn}/pin",
    summary="Let a turn be compacted like any other",
    response_model=None,
    responses=answers(200, TurnShape, errors=(404,)),
)
async def unpin(request: Request, caller: Caller, session_id: str, turn: str) -> Response:
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    record = await turn_of(gateway, session, turn)
    return await _pinned(gateway, session, record.turn.id, False)


async def _pinned(gateway: Gateway, session: SessionRecord, turn_id: str, pinned: bool) -> Response:
    record = await gateway.store.pin_turn(session.tenant_id, session.id, turn_id, pinned)
    gateway.registry.heads.forget(session.tenant_id, session.id)
    if record is None:
        raise NotFound(f"no turn {turn_id[:64]!r} in this session", code="turn_not_found", param="turn")
    return json_response(turn_json(record))


async def _check_pin_budget(gateway: Gateway, session: SessionRecord, turn_id: str) -> None:
    """Pins that leave a conversation no room would only make its turns fail later."""
    room = gateway.room
    taken = await take(
        room.store,
        room.fleet,
        room.models,
        session,
        room.compactions.policy(session),
        default_max_tokens=room.max_output_tokens,
        parent=turn_id,
    )
    if taken is None:
        return
    pinned = sum(turn.tokens for turn in taken.sizes.turns if turn.pinned or turn.id == turn_id)
    needed, limit = pinned + taken.sizes.overhead_tokens, int(PIN_SHARE * taken.window)
    if needed > limit:
        raise Conflict(
            f"system prompt, tools and pinned turns would take {needed} tokens; {limit} are the most, half the window",
            code="pin_budget",
        )
