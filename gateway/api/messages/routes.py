"""`/v1/messages`: what Anthropic's clients speak, on the conversations of chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.body import json_object, validated
from gateway.api.chat import command_of, end_of, headers_of, turnkeep_of
from gateway.api.describe import answers, body_of
from gateway.api.messages.asked import chat_body, refuse_undone
from gateway.api.messages.schemas import CountBody, MessagesBody, MessageShape, TokensShape
from gateway.api.messages.shapes import Event, MessageEvents, message_json
from gateway.api.schemas import ChatBody
from gateway.api.sessions import json_response
from gateway.api.state import Gateway, gateway_of
from gateway.api.streams import Awaited, EventStream, event, failed_named
from gateway.sessions.command import TurnCommand
from gateway.sessions.failures import as_event
from gateway.sessions.history import History
from gateway.sessions.prepare import prepare
from gateway.sessions.run import Piece
from gateway.sessions.turn import start
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/messages", tags=["Anthropic-compatible"])
Caller = Annotated[Identity, Depends(needs("chat"))]


@router.post(
    "",
    summary="Answer a conversation, in Anthropic's shapes",
    response_model=None,
    responses=answers(200, MessageShape, streams=True, errors=(400, 404, 409, 413, 415, 422, 429, 502, 503, 504)),
    openapi_extra=body_of(MessagesBody),
)
async def create(request: Request, caller: Caller) -> Response:
    """The whole history comes with each request and is recognised, or belongs to the session that a header names."""
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, images=True)
    refuse_undone(raw)
    asked = validated(MessagesBody, raw)
    chat = chat_body(asked)
    command = await command_of(request, gateway, caller, chat, validated(ChatBody, chat), body)
    if asked.stream:
        headers: dict[str, str] = {}
        source = _stream(gateway, command, asked.model, headers)
        return EventStream(source, heartbeat_s=gateway.settings.heartbeat_s, headers=headers, failed=failed_named)

    async def answer() -> Response:
        run = await start(gateway.room, command)
        ended = await end_of(run)
        return json_response(message_json(run.turn_id, ended, asked.model, turnkeep_of(ended)), headers=headers_of(run))

    return Awaited(answer)


async def _stream(
    gateway: Gateway, command: TurnCommand, model: str, headers: dict[str, str]
) -> AsyncGenerator[bytes, None]:
    """What has happened since the last value, encoded; a turn that fails before its first piece raises."""
    run = await start(gateway.room, command)
    headers |= headers_of(run)
    told = MessageEvents(run.turn_id, model)
    seen, begun = 0, False
    with run.reading():
        while True:
            await run.wait_beyond(seen)
            pieces = [happened for happened in run.events[seen:] if isinstance(happened, Piece)]
            seen = len(run.events)
            out = [made for piece in pieces for made in told.piece(piece)]
            if out and not begun:
                out, begun = [told.started(), *out], True
            if run.ended is not None or run.moved:
                break
            if out:
                yield _encoded(out)
    failed = run.handed_over() if run.ended is None else run.failure
    cut = run.ended is None or run.ended.status == "failed" or bool((run.ended.error or {}).get("partial"))
    if cut and not begun and failed is not None:
        raise failed
    if cut:
        error: Any = as_event(failed) if failed is not None else (run.ended.error if run.ended is not None else {})
        out.append({"type": "error", "error": error})
    elif run.ended is not None:
        out = [*([] if begun else [told.started()]), *out, *told.ended(run.ended, turnkeep_of(run.ended))]
    yield _encoded(out)


def _encoded(events: list[Event]) -> bytes:
    return b"".join(event(orjson.dumps(made), name=made["type"]) for made in events)


@router.post(
    "/count_tokens",
    summary="Count a conversation, in Anthropic's shapes",
    response_model=None,
    responses=answers(200, TokensShape, errors=(400, 404, 413, 415, 422, 429)),
    openapi_extra=body_of(CountBody),
)
async def count_tokens(request: Request, caller: Caller) -> Response:
    """With the model's own template, tools and system prompt included. Nothing is generated or saved."""
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, images=True)
    refuse_undone(raw)
    chat = {**chat_body(validated(CountBody, raw)), "history": "off"}
    command = await command_of(request, gateway, caller, chat, validated(ChatBody, chat), body)
    prepared = await prepare(
        command.ask,
        History(),
        fleet=gateway.fleet,
        models=gateway.models,
        session_name=None,
        default_max_tokens=gateway.settings.max_output_tokens,
        param="messages",
        tenant_id=caller.tenant_id,
        salt=gateway.room.cache_salt(caller.tenant_id),
    )
    return json_response({"input_tokens": prepared.prompt_tokens})
