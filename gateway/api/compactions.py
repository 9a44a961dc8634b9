"""Compactions of a session: plan, make, see, take back; and turns that stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Annotated, Any, TypeVar

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
from gateway.api.streams import Awaited, EventStream, event, failed_named, last_event_id
from gateway.api.turns import turn_of
from gateway.errors import Conflict, NotFound, ShuttingDown
from gateway.sessions.compaction import GONE, Idle, Outcome
from gateway.sessions.compaction_events import STEPS, shown
from gateway.sessions.compaction_events import events_of as compaction_events
from gateway.sessions.pins import pinned
from gateway.sessions.recognise import SESSION_KEY
from gateway.store.compaction_records import CompactionRecord
from gateway.store.records import SessionRecord, TurnRecord
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["Compaction"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
Reader = Annotated[Identity, Depends(needs("sessions", "read"))]
T = TypeVar("T")
FOLLOW_S = 0.5  # how often the store is asked for news
STOP_LOOK_S = 0.2  # how often one who waits for a compaction looks whether the gateway shuts down
FOLLOWING = b": following\n\n"  # the answer begins at once, whenever the first event comes
PAGE = 10  # rows that are read at a time


def _planned(session: SessionRecord, status: str, plan: Plan | NoPlan | None, **more: Any) -> dict[str, Any]:
    """What came of it where there is no row: a dry run's plan, or why nothing was done."""
    told = plan.as_json() if plan is not None else {}
    return {"object": "compaction", "session_id": session.id, "status": status, "plan": told, **more}


@router.post(
    "/compact",
    summary="Compact now, or only plan it",
    response_model=None,
    responses=answers(200, CompactionShape, errors=(400, 404, 413, 415, 503)),
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
        outcome = await _while_serving(request, session, work)
        if outcome is GONE:
            await session_of(gateway, caller, session_id)
            raise ShuttingDown
        return json_response(_told(session, outcome))

    return Awaited(answer)


async def _while_serving(request: Request, session: SessionRecord, work: Coroutine[Any, Any, T]) -> T:
    """What comes of it. A gateway that shuts down stops the session's compaction: it is cheap to lose."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=STOP_LOOK_S))[0]:
            if request.app.state.stopping:
                gateway_of(request).room.compactions.forget(session.tenant_id, session.id)
        return task.result()
    finally:
        task.cancel()


def _told(session: SessionRecord, outcome: Outcome | Plan | NoPlan) -> dict[str, Any]:
    if isinstance(outcome, CompactionRecord):
        return compaction_json(outcome)
    if isinstance(outcome, Idle):
        message = {"message": outcome.message} if outcome.message else {}
        return _planned(session, "skipped", outcome.plan, reason=outcome.reason, **message)
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
    caller: Reader,
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
    caller: Reader,
    session_id: str,
    starting_after: Annotated[int, Query(ge=0, lt=2**31, description="The last sequence number seen.")] = 0,
    after: Annotated[
        int, Query(ge=0, lt=2**29, description="Only compactions with a larger number, where nothing else is said.")
    ] = 0,
) -> Response:
    """`session.compaction.started`, `.completed`, `.failed`, `.skipped`, `.reverted`, wherever it runs, those that were
    first. Honours Last-Event-ID. A revert may be told again after a resume. The stream goes on until the client leaves,
    the session is deleted or the gateway stops."""
    gateway = gateway_of(request)
    await session_of(gateway, caller, session_id)
    seen = last_event_id(request, starting_after) or STEPS * after
    source = _followed(request, gateway, caller.tenant_id, session_id, seen)
    return EventStream(source, heartbeat_s=gateway.settings.heartbeat_s, failed=failed_named)


async def _followed(
    request: Request, gateway: Gateway, tenant_id: str, session_id: str, seen: int
) -> AsyncGenerator[bytes, None]:
    """Events past `seen`. When a revert came is not known, so one with a smaller number is told again."""
    told: set[int] = set()
    settled, view_version = 0, -1  # up to that number nothing new comes but reverts, and those change the view
    yield FOLLOWING
    while not request.app.state.stopping:
        session = await gateway.store.get_session(tenant_id, session_id)
        if session is None:
            return
        down_to = settled if session.view_version == view_version else 0
        records = [record async for record in _newest(gateway, tenant_id, session_id, down_to)]
        news = b""
        for record in reversed(records):
            for number, what, then in compaction_events(record):
                if number not in told and (number > seen or what == "reverted"):
                    news += _event(number, what, then)
                told.add(number)
        if news:
            yield news
        running = [record.number - 1 for record in records if record.status == "running"]
        settled = min(running, default=max([settled, *(record.number for record in records)]))
        view_version = session.view_version
        await asyncio.sleep(FOLLOW_S)


async def _newest(
    gateway: Gateway, tenant_id: str, session_id: str, down_to: int
) -> AsyncGenerator[CompactionRecord, None]:
    """Those with a larger number, newest first."""
    before: int | None = None
    while page := await gateway.store.list_compactions(tenant_id, session_id, limit=PAGE, before=before):
        for record in page:
            if record.number <= down_to:
                return
            yield record
        before = page[-1].number


def _event(number: int, what: str, record: CompactionRecord) -> bytes:
    kind = f"session.compaction.{what}"
    told = {"sequence_number": number, "type": kind, "compaction": shown(record)}
    return event(orjson.dumps(told), name=kind, id=number)


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
async def get_compaction(request: Request, caller: Reader, session_id: str, compaction: str) -> Response:
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
    stands = record if record.pinned else await pinned(gateway.room, session, record.turn.id)
    return _pin_told(gateway, session, stands)


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
    unpinned = await gateway.store.pin_turn(session.tenant_id, session.id, record.turn.id, False)
    return _pin_told(gateway, session, unpinned)


def _pin_told(gateway: Gateway, session: SessionRecord, record: TurnRecord | None) -> Response:
    gateway.registry.heads.forget(session.tenant_id, session.id)
    if record is None:
        raise NotFound("the turn is gone", code="turn_not_found", param="turn")
    return json_response(turn_json(record))
