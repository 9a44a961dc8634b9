"""`/v1/sessions/{id}/turns`: send a message, read the answers, branch, stop and resume."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.asked import choice_of, format_of, plain, shape_of
from gateway.api.body import json_object, validated
from gateway.api.chat import idempotency_key_of
from gateway.api.describe import answers, body_of
from gateway.api.schemas import AnswerFields, Edit, Regenerate, TurnCreate, TurnList, TurnShape
from gateway.api.sessions import json_response, session_of
from gateway.api.shapes import turn_json
from gateway.api.state import Gateway, gateway_of
from gateway.api.streams import Awaited, EventStream, event, failed_named, last_event_id
from gateway.errors import BadRequest, Conflict, NotFound, UpstreamFailed
from gateway.policy import min_bits_of
from gateway.sessions.command import Ask, Input, TurnCommand
from gateway.sessions.events import event_json, event_type
from gateway.sessions.items import check_answerable, parse_items
from gateway.sessions.recognise import SESSION_KEY
from gateway.sessions.resume import resumed
from gateway.sessions.run import Piece, TurnEnded, TurnRun
from gateway.sessions.turn import start
from gateway.store.records import HEAD, SessionRecord, TurnRecord
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["Turns"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
Reader = Annotated[Identity, Depends(needs("sessions", "read"))]
HANDED_OVER = "session.turn.handed_over"
TURN_ERRORS = (400, 404, 409, 413, 415, 422, 429, 502, 503, 504)


@router.post(
    "/turns",
    summary="Send the new message and get the answer",
    response_model=None,
    responses=answers(200, TurnShape, streams=True, errors=TURN_ERRORS),
    openapi_extra=body_of(TurnCreate),
)
async def create_turn(request: Request, caller: Caller, session_id: str) -> Response:
    """`input` is a user message, or a list of items. With `stream` the answer comes as events, each numbered; the last
    one is `session.turn.completed`, `.incomplete` or `.failed`."""
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, images=True)
    asked = validated(TurnCreate, raw)
    known = gateway.registry.heads.get(caller.tenant_id, session_id)
    session = known.session if known is not None else await session_of(gateway, caller, session_id)
    command = _command(request, gateway, caller, session, asked, body, inputs_of(asked.input), asked.instructions)
    if asked.parent_turn_id is not None:
        parent = await turn_of(gateway, session, asked.parent_turn_id)
        command = _on(command, HEAD if parent.turn.id == session.head_turn_id else parent.turn.id)
    return respond(gateway, command, stream=bool(asked.stream))


def inputs_of(value: Any) -> tuple[Input, ...]:
    """Items with their mark; an ephemeral one is a message. Raises BadRequest."""
    if isinstance(value, str):
        return tuple(Input(item) for item in parse_items(value))
    found: list[Input] = []
    for i, entry in enumerate(value):
        entry = dict(entry)
        mark = entry.pop("ephemeral", False)
        if not isinstance(mark, bool):
            raise BadRequest(f"input[{i}].ephemeral is true or false", param=f"input[{i}].ephemeral")
        items = parse_items([entry], param="input", first=i)
        if mark and any(item.type != "message" for item in items):
            raise BadRequest(f"input[{i}]: only a message can be ephemeral", param=f"input[{i}].ephemeral")
        found += [Input(item, mark) for item in items]
    if all(entry.ephemeral for entry in found):
        raise BadRequest("input holds only ephemeral items: nothing would be kept", param="input")
    check_answerable([entry.item for entry in found], param="input")
    return tuple(found)


def _command(
    request: Request,
    gateway: Gateway,
    caller: Identity,
    session: SessionRecord,
    asked: AnswerFields,
    body: bytes,
    inputs: tuple[Input, ...],
    instructions: str | None,
) -> TurnCommand:
    def ask_of(session: SessionRecord) -> Ask:
        tools = tuple(dict(tool) for tool in session.tools)
        policy = gateway.room.compactions.policy(session)
        limit = asked.max_output_tokens or session.policy.get("max_output_tokens")
        return Ask(
            model=session.model,
            input=inputs,
            system=session.system,
            instructions=instructions,
            tools=tools,
            tool_choice=choice_of(asked, tools),
            parallel_tool_calls=asked.parallel_tool_calls,
            response_format=format_of(asked),
            reasoning_effort=asked.reasoning_effort,
            template_options=asked.chat_template_kwargs or {},
            old_reasoning=policy.reasoning,
            kv_shift=policy.kv_shift,
            min_bits=min_bits_of({"cache": plain(asked.cache)}, session.policy),
            shape=shape_of(asked, max_tokens=limit, logprobs=asked.logprobs, top=asked.top_logprobs),
        )

    wish = asked.on_disconnect or session.policy.get("on_disconnect") or gateway.settings.session_on_disconnect
    key = idempotency_key_of(request)
    return TurnCommand(
        tenant_id=session.tenant_id,
        ask=ask_of(session),
        key_id=caller.key_id,
        told=caller.told,
        version=session.version,
        ask_of=ask_of,
        session_id=session.id,
        idempotency_key=key,
        request_hash=hashlib.sha256(request.url.path.encode() + b"\0" + body).digest() if key is not None else None,
        on_disconnect=wish,
        persist_events=bool(asked.stream),
    )


def _on(command: TurnCommand, parent: str | None) -> TurnCommand:
    return replace(command, parent=parent)


def respond(gateway: Gateway, command: TurnCommand, *, stream: bool) -> Response:
    if stream:
        source = _started(gateway, command)
        return EventStream(source, heartbeat_s=gateway.settings.heartbeat_s, failed=failed_named)

    async def answer() -> Response:
        run = await start(gateway.room, command)
        with run.reading():
            ended = await run.wait_end()
        return await _ended(gateway, run, ended)

    return Awaited(answer)


async def _ended(gateway: Gateway, run: TurnRun, ended: TurnEnded) -> Response:
    error = ended.error or {}
    if ended.status == "failed" or error.get("partial"):
        raise run.failure or UpstreamFailed(str(error.get("message", "the turn failed")), code=str(error.get("code")))
    assert run.session_id is not None
    record = await gateway.store.get_turn(run.tenant_id, run.session_id, run.turn_id)
    if record is None:
        raise NotFound("the session was deleted while its turn ran", code="session_not_found")
    return json_response(turn_json(record))


async def _started(gateway: Gateway, command: TurnCommand) -> AsyncGenerator[bytes, None]:
    run = await start(gateway.room, command)
    async with aclosing(_events(run, 0)) as events:
        async for data in events:
            yield data


async def _events(run: TurnRun, after: int) -> AsyncGenerator[bytes, None]:
    """Encoded events past `after`; a turn that fails before its first piece raises, so that the status says it."""
    held, pieces = b"", 0
    async with aclosing(run.follow(after)) as events:
        async for seq, happened in events:
            if isinstance(happened, TurnEnded) and happened.status == "failed" and pieces == 0 and run.failure:
                raise run.failure
            encoded = event(event_json(seq, happened), name=event_type(happened), id=seq)
            if pieces == 0 and not isinstance(happened, Piece | TurnEnded):
                held += encoded
                continue
            pieces += 1
            yield held + encoded
            held = b""
    if run.moved:  # no number: it is none of the turn's events, and what the reader has seen stays the last
        told = {"type": HANDED_OVER, "turn": {"id": run.turn_id, "session_id": run.session_id}}
        yield held + event(orjson.dumps(told), name=HANDED_OVER)


async def turn_of(gateway: Gateway, session: SessionRecord, turn: str) -> TurnRecord:
    """By id, or by seq."""
    record = None
    if turn.isascii() and turn.isdigit() and len(turn) < 16:
        record = await gateway.store.get_turn_by_seq(session.tenant_id, session.id, int(turn))
    elif SESSION_KEY.fullmatch(turn):
        record = await gateway.store.get_turn(session.tenant_id, session.id, turn)
    if record is None:
        raise NotFound(f"no turn {turn[:128]!r} in this session", code="turn_not_found", param="turn")
    return record


@router.get(
    "/turns",
    summary="List turns",
    response_model=None,
    responses=answers(200, TurnList, errors=(400, 404)),
)
async def list_turns(
    request: Request,
    caller: Reader,
    session_id: str,
    after: Annotated[int | None, Query(ge=0, lt=2**53, description="Only turns with a larger seq.")] = None,
    before: Annotated[int | None, Query(ge=0, lt=2**53, description="Only turns with a smaller seq.")] = None,
    order: Annotated[str, Query(pattern="^(asc|desc)$")] = "asc",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    branch: Annotated[
        str | None, Query(max_length=128, description="Only the path to this turn; `head` for the live one.")
    ] = None,
    include: Annotated[str | None, Query(pattern="^token_ids$", description="token_ids: with their ids.")] = None,
) -> Response:
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    leaf = None
    if branch is not None:
        leaf = session.head_turn_id if branch == "head" else (await turn_of(gateway, session, branch)).turn.id
        if leaf is None:
            return json_response({"object": "list", "data": [], "has_more": False})
    found = await gateway.store.list_turns(
        caller.tenant_id,
        session_id,
        after=after,
        before=before,
        order="asc" if order == "asc" else "desc",
        limit=limit + 1,
        path_of=leaf,
    )
    data = [turn_json(record, token_ids=include == "token_ids") for record in found[:limit]]
    return json_response({"object": "list", "data": data, "has_more": len(found) > limit})


@router.get(
    "/turns/{turn}",
    summary="One turn, by id or seq",
    response_model=None,
    responses=answers(200, TurnShape, errors=(400, 404)),
)
async def get_turn(
    request: Request,
    caller: Reader,
    session_id: str,
    turn: str,
    include: Annotated[str | None, Query(pattern="^token_ids$")] = None,
) -> Response:
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    return json_response(turn_json(await turn_of(gateway, session, turn), token_ids=include == "token_ids"))


@router.post(
    "/turns/{turn}/regenerate",
    summary="Answer a turn's input once more, as a branch",
    response_model=None,
    responses=answers(200, TurnShape, streams=True, errors=TURN_ERRORS),
    openapi_extra=body_of(Regenerate, required=False),
)
async def regenerate(request: Request, caller: Caller, session_id: str, turn: str) -> Response:
    """The new turn becomes the head; the old one stays."""
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, empty=True)
    asked = validated(Regenerate, raw)
    session = await session_of(gateway, caller, session_id)
    record = await turn_of(gateway, session, turn)
    inputs = tuple(Input(item) for item in record.turn.input)
    command = _command(request, gateway, caller, session, asked, body, inputs, asked.instructions)
    return respond(gateway, _on(command, record.turn.parent_id), stream=bool(asked.stream))


@router.post(
    "/turns/{turn}/edit",
    summary="Put another input in a turn's place, as a branch",
    response_model=None,
    responses=answers(200, TurnShape, streams=True, errors=TURN_ERRORS),
    openapi_extra=body_of(Edit),
)
async def edit(request: Request, caller: Caller, session_id: str, turn: str) -> Response:
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, images=True)
    asked = validated(Edit, raw)
    session = await session_of(gateway, caller, session_id)
    record = await turn_of(gateway, session, turn)
    command = _command(request, gateway, caller, session, asked, body, inputs_of(asked.input), asked.instructions)
    return respond(gateway, _on(command, record.turn.parent_id), stream=bool(asked.stream))


@router.post(
    "/turns/{turn}/cancel",
    summary="Stop a running turn",
    response_model=None,
    status_code=202,
    responses=answers(202, TurnShape, errors=(404, 409)),
)
async def cancel(request: Request, caller: Caller, session_id: str, turn: str) -> Response:
    """The engine stops within a second; what was generated stays, as an incomplete answer. Works at any gateway."""
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    record = await turn_of(gateway, session, turn)
    run = gateway.registry.find(caller.tenant_id, record.turn.id, record.fence)
    if run is not None and run.ended is None:
        run.cancel("cancelled")
        if run.cancel_reason == "gateway_shutdown":  # it is being handed over: whoever takes it must hear of it
            await gateway.store.request_cancel(caller.tenant_id, session_id, record.turn.id)
    elif not await gateway.store.request_cancel(caller.tenant_id, session_id, record.turn.id):
        raise Conflict(f"the turn is {record.turn.status}: there is nothing to stop", code="turn_not_running")
    return json_response(turn_json(record), 202)


@router.get(
    "/turns/{turn}/stream",
    summary="Follow a turn's events, from any of them on",
    response_model=None,
    responses=answers(200, None, media_type="text/event-stream", errors=(400, 404)),
)
async def stream_turn(
    request: Request,
    caller: Reader,
    session_id: str,
    turn: str,
    starting_after: Annotated[int, Query(ge=0, lt=2**31, description="The last sequence number seen.")] = 0,
) -> Response:
    """Works at any gateway, while the turn runs and for a while after it. Honours Last-Event-ID."""
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    record = await turn_of(gateway, session, turn)
    return _resume(request, gateway, record, starting_after, caller)


@router.get(
    "/stream",
    summary="Follow the newest turn's events",
    response_model=None,
    responses=answers(200, None, media_type="text/event-stream", errors=(400, 404)),
)
async def stream_session(
    request: Request,
    caller: Reader,
    session_id: str,
    starting_after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
) -> Response:
    gateway = gateway_of(request)
    await session_of(gateway, caller, session_id)
    newest = await gateway.store.list_turns(caller.tenant_id, session_id, order="desc", limit=1)
    if not newest:
        raise NotFound("this session has no turn yet", code="turn_not_found")
    return _resume(request, gateway, newest[0], starting_after, caller)


def _resume(request: Request, gateway: Gateway, record: TurnRecord, starting_after: int, caller: Identity) -> Response:
    after = last_event_id(request, starting_after)

    async def source() -> AsyncGenerator[bytes, None]:
        async with aclosing(resumed(gateway.room, record, after, watching=caller.only_reads)) as events:
            async for seq, kind, data in events:
                yield event(data, name=kind, id=seq)

    return EventStream(source(), heartbeat_s=gateway.settings.heartbeat_s, failed=failed_named)


@router.get(
    "/branches",
    summary="The leaves of the session's tree",
    response_model=None,
    responses=answers(200, TurnList, errors=(404,)),
)
async def branches(request: Request, caller: Reader, session_id: str) -> Response:
    """Every turn that no other goes on from, newest first."""
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    leaves, before, parents = [], None, set()
    while found := await gateway.store.list_turns(
        session.tenant_id, session.id, before=before, order="desc", limit=100
    ):
        for record in found:
            if record.turn.id not in parents:
                leaves.append(turn_json(record))
            if record.turn.parent_id is not None:
                parents.add(record.turn.parent_id)
        before = found[-1].turn.seq
    return json_response({"object": "list", "data": leaves, "has_more": False})
