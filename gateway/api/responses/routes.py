"""`/v1/responses`: make, read, follow, stop and delete responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.auditing import line_of
from gateway.api.body import json_object, validated
from gateway.api.chat import headers_of
from gateway.api.describe import answers, body_of
from gateway.api.responses.asked import check_together, refuse_undone
from gateway.api.responses.command import command_of
from gateway.api.responses.ids import named_input
from gateway.api.responses.inputs import read_items
from gateway.api.responses.items import shown_all
from gateway.api.responses.pages import After, Include, IncludePlain, Limit, Order, included, page
from gateway.api.responses.places import place_of, with_model
from gateway.api.responses.places import response as found_response
from gateway.api.responses.schemas import DeletedShape, ItemList, ResponseCreate, ResponseShape
from gateway.api.responses.telling import Teller, failed_response
from gateway.api.sessions import json_response
from gateway.api.state import Gateway, gateway_of
from gateway.api.streams import Awaited, EventStream, last_event_id
from gateway.errors import BadRequest, Conflict, UpstreamFailed
from gateway.sessions.command import TurnCommand
from gateway.sessions.run import TurnRun
from gateway.sessions.turn import start
from gateway.store.records import TurnRecord
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/responses", tags=["OpenAI-compatible"])
Caller = Annotated[Identity, Depends(needs("chat"))]
Reader = Annotated[Identity, Depends(needs("chat", "read"))]
STOPS_WITHIN_S = 3.0  # a cancel waits this long for the end that it asked for
LOOKS_EVERY_S = 0.1


@router.post(
    "",
    summary="Answer, and keep the answer",
    response_model=None,
    responses=answers(200, ResponseShape, streams=True, errors=(400, 404, 409, 413, 415, 422, 429, 502, 503, 504)),
    openapi_extra=body_of(ResponseCreate),
)
async def create(request: Request, caller: Caller) -> Response:
    """Goes on from `previous_response_id` or in `conversation`; with neither it begins a conversation of its own."""
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, images=True)
    refuse_undone(raw)
    asked = validated(ResponseCreate, raw)
    check_together(asked)
    if asked.input is None:
        raise BadRequest("input is missing: a string, or a list of items", param="input")
    place = await place_of(gateway, caller.tenant_id, asked)
    items = await read_items(gateway.store, gateway.content_seal, caller.tenant_id, asked.input, param="input")
    if asked.store is not False:
        place = await with_model(gateway, place, asked.model)
    command = command_of(request, gateway, caller, asked, body, items, place)
    teller = Teller(gateway, caller.tenant_id)
    if asked.stream:
        return EventStream(_streamed(teller, command), heartbeat_s=gateway.settings.heartbeat_s, failed=failed_response)

    async def answer() -> Response:
        run = await start(gateway.room, command)
        if not asked.background:
            await _ended(run)
        return json_response(teller.of_run(run), headers=headers_of(run))

    return Awaited(answer)


async def _streamed(teller: Teller, command: TurnCommand) -> AsyncGenerator[bytes, None]:
    run = await start(teller.gateway.room, command)
    async with aclosing(teller.live(run)) as events:
        async for data in events:
            yield data


async def _ended(run: TurnRun) -> None:
    """Waits for the end, as a reader; a failed turn raises what it failed with."""
    with run.reading():
        ended = await run.wait_end()
    error = ended.error or {}
    if ended.status == "failed" or error.get("partial"):
        raise run.failure or UpstreamFailed(
            str(error.get("message", "the turn failed")), code=str(error.get("code", "turn_failed"))
        )


@router.get(
    "/{response_id}",
    summary="A response, or its stream from any event on",
    response_model=None,
    responses=answers(200, ResponseShape, streams=True, errors=(400, 404)),
)
async def get(
    request: Request,
    caller: Reader,
    response_id: str,
    stream: Annotated[bool, Query(description="Its events, while it runs and afterwards.")] = False,
    starting_after: Annotated[int | None, Query(ge=0, lt=2**31, description="The last sequence_number seen.")] = None,
    include_obfuscation: Annotated[bool, Query(description="Only false.")] = False,
    include: Include = None,
    include_: IncludePlain = None,
) -> Response:
    """Works at any gateway. Honours Last-Event-ID."""
    gateway = gateway_of(request)
    if include_obfuscation:
        raise BadRequest("there is no obfuscation", code="unsupported_parameter", param="include_obfuscation")
    if starting_after is not None and not stream:
        raise BadRequest("starting_after needs stream=true", param="starting_after")
    teller = Teller(gateway, caller.tenant_id, included(include, include_))
    record, _ = await found_response(gateway, caller.tenant_id, response_id)
    if not stream:
        return json_response(teller.of_record(record))
    after = last_event_id(request, -1 if starting_after is None else starting_after)
    source = teller.again(record, None if after < 0 else after, watching=caller.only_reads)
    return EventStream(source, heartbeat_s=gateway.settings.heartbeat_s, failed=failed_response)


@router.post(
    "/{response_id}/cancel",
    summary="Stop a response",
    response_model=None,
    responses=answers(200, ResponseShape, errors=(404,)),
)
async def cancel(request: Request, caller: Caller, response_id: str) -> Response:
    """In the background or not, at any gateway; what was generated stays. One that has ended is told as it is."""
    gateway = gateway_of(request)
    record, _ = await found_response(gateway, caller.tenant_id, response_id)
    if record.turn.status == "in_progress":
        record = await _stopped(gateway, record)
    return json_response(Teller(gateway, caller.tenant_id).of_record(record))


async def _stopped(gateway: Gateway, record: TurnRecord) -> TurnRecord:
    names = (record.tenant_id, record.session_id, record.turn.id)
    run = gateway.registry.find(record.tenant_id, record.turn.id, record.fence)
    if run is not None:
        run.cancel("cancelled")
    if run is None or run.cancel_reason == "gateway_shutdown":
        await gateway.store.request_cancel(*names)
    with anyio.move_on_after(STOPS_WITHIN_S):
        while record.turn.status == "in_progress":
            await anyio.sleep(LOOKS_EVERY_S)
            record = await gateway.store.get_turn(*names) or record
    return record


@router.delete(
    "/{response_id}",
    summary="Delete a response",
    response_model=None,
    responses=answers(200, DeletedShape, errors=(404, 409)),
)
async def delete(request: Request, caller: Caller, response_id: str) -> Response:
    """It is gone at once, and its words with it where nothing rests on them: later responses, a conversation, or a
    summary. What is left of it goes with the last of those."""
    gateway = gateway_of(request)
    record, session = await found_response(gateway, caller.tenant_id, response_id)
    if record.turn.status == "in_progress":
        raise Conflict("the response is in progress: cancel it first", code="response_in_progress")
    names = (caller.tenant_id, record.session_id, record.turn.id)
    line = line_of(request, caller, "response.delete", response_id)
    erased = await gateway.store.delete_response(*names, line=line)
    if erased is None:
        raise Conflict("the response is in progress: cancel it first", code="response_in_progress")
    counts: dict[str, Any] = dict(erased)
    if counts:
        gateway.registry.forget(caller.tenant_id, session.id)
        await gateway.places.soon()
    return json_response({"id": response_id, "object": "response", "deleted": True, "erased": counts})


@router.get(
    "/{response_id}/input_items",
    summary="What a response was given",
    response_model=None,
    responses=answers(200, ItemList, errors=(400, 404)),
)
async def input_items(
    request: Request,
    caller: Reader,
    response_id: str,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    include: Include = None,
    include_: IncludePlain = None,
) -> Response:
    """Its own input; what it went on from is at the responses before it, and in its conversation."""
    gateway = gateway_of(request)
    included(include, include_)
    record, _ = await found_response(gateway, caller.tenant_id, response_id)
    items = shown_all(named_input(record.turn))
    return json_response(page(items, after=after, limit=limit, order=order))
