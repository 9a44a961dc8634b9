"""`/v1/responses/input_tokens`: how long the prompt of a response would be, from the function that builds it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.responses.asked import check_place, refuse_undone
from gateway.api.responses.command import ask_of
from gateway.api.responses.inputs import read_items
from gateway.api.responses.places import place_of
from gateway.api.responses.schemas import InputTokens, InputTokensShape
from gateway.api.sessions import json_response
from gateway.api.state import gateway_of
from gateway.errors import BadRequest
from gateway.sessions.command import Shape
from gateway.sessions.history import History, load
from gateway.sessions.items import check_pairs
from gateway.sessions.prepare import prepare
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/responses", tags=["OpenAI-compatible"])
Caller = Annotated[Identity, Depends(needs("chat"))]


@router.post(
    "/input_tokens",
    summary="Count what a response would be given",
    response_model=None,
    responses=answers(200, InputTokensShape, errors=(400, 404, 409, 413, 415, 422, 429)),
    openapi_extra=body_of(InputTokens),
)
async def input_tokens(request: Request, caller: Caller) -> Response:
    """With the model's own template, history, instructions and tools included. Nothing is generated or saved."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, images=True)
    refuse_undone(raw)
    asked = validated(InputTokens, raw)
    check_place(asked)
    if asked.input is None:
        raise BadRequest("input is missing: a string, or a list of items", param="input")
    place = await place_of(gateway, caller.tenant_id, asked)
    items = await read_items(gateway.store, gateway.content_seal, caller.tenant_id, asked.input, param="input")
    session, history = place.session, History()
    if session is not None:
        history = await load(gateway.store, session, place.parent)
    check_pairs(history.open_calls, items)
    prepared = await prepare(
        ask_of(gateway, asked, items, session, Shape()),
        history,
        fleet=gateway.fleet,
        models=gateway.models,
        session_name=gateway.room.session_name(caller.tenant_id, session.id) if session is not None else None,
        default_max_tokens=gateway.settings.max_output_tokens,
        tenant_id=caller.tenant_id,
        salt=gateway.room.cache_salt(caller.tenant_id),
    )
    return json_response(
        {
            "object": "response.input_tokens",
            "input_tokens": prepared.prompt_tokens,
            "window": prepared.window,
            "exact": prepared.built is not None,
            "counted_by": prepared.counted_by,
        }
    )
