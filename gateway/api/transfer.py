"""A session as JSON lines, and back: one line for the session, then one for each turn, parents before children.

    {"object": "session", "format": 1, …}
    {"object": "turn", "id", "parent_id", "seq", "status", "input": [items], "output": [items], "usage", …}

An import checks every line before anything is written. Token ids are not exported: they are made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.asked import plain, tools_of
from gateway.api.auditing import line_of
from gateway.api.body import read_body, validated
from gateway.api.describe import answers
from gateway.api.imported import FORMAT, ImportedTurn, parse_lines
from gateway.api.schemas import ImportShape, SessionCreate
from gateway.api.sessions import REQUEST_MARK, check_summariser, session_of, session_response
from gateway.api.shapes import compaction_json
from gateway.api.state import Gateway, gateway_of
from gateway.api.stored import create
from gateway.errors import BadRequest, Conflict, TooLarge
from gateway.sessions.command import Ask
from gateway.sessions.history import TAIL
from gateway.sessions.items import meaning, root_meaning
from gateway.sessions.pins import check_pinned
from gateway.store.records import BeginTurn, Begun, DuplicateId, FinishTurn, NewSession, SessionRecord, TurnRecord
from gateway.store.sessions import Store
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions", tags=["Sessions"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
Reader = Annotated[Identity, Depends(needs("sessions", "read"))]
PAGE = 100
LINES = "application/x-ndjson"
IMPORT_TYPES = frozenset({LINES, "application/jsonl", "application/json"})


@router.get(
    "/{session_id}/export",
    summary="The whole session as JSON lines",
    response_model=None,
    responses=answers(200, None, media_type=LINES, errors=(404,)),
)
async def export(request: Request, caller: Reader, session_id: str) -> Response:
    """First the session, then each turn with its items in OpenAI's shapes, branches included, in order of seq; last the
    compaction through which the head is seen, where there is one."""
    gateway = gateway_of(request)
    session = await session_of(gateway, caller, session_id)
    name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in session_id)
    headers = {"content-disposition": f'attachment; filename="{name}.jsonl"'}
    return Response(b"".join(await export_lines(gateway.store, session)), media_type=LINES, headers=headers)


async def export_lines(store: Store, session: SessionRecord) -> list[bytes]:
    lines = [_line(_session(session))]
    after: int | None = None
    while found := await store.list_turns(session.tenant_id, session.id, after=after, limit=PAGE):
        lines += [_line(_turn(record)) for record in found]
        after = found[-1].turn.seq
    if session.head_turn_id is not None:
        standing = await store.view_of(session.tenant_id, session.id, session.head_turn_id)
        if standing.compaction is not None:
            lines.append(_line(compaction_json(standing.compaction)))
    return lines


def _line(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(value) + b"\n"


def _session(session: SessionRecord) -> dict[str, Any]:
    return {
        "object": "session",
        "format": FORMAT,
        "id": session.id,
        "model": session.model,
        "system": session.system,
        "tools": list(session.tools),
        "title": session.title,
        "user_ref": session.user_ref,
        "metadata": dict(session.metadata),
        "policy": {k: v for k, v in session.policy.items() if k != REQUEST_MARK},
        "head_turn_id": session.head_turn_id,
        "created_at": session.created_at,
    }


def _turn(record: TurnRecord) -> dict[str, Any]:
    turn = record.turn
    return {
        "object": "turn",
        "id": turn.id,
        "parent_id": turn.parent_id,
        "seq": turn.seq,
        "status": turn.status,
        "model": record.model,
        "finish_reason": record.finish_reason,
        "input": [dict(item.payload) for item in turn.input],
        "output": [dict(item.payload) for item in turn.output],
        "usage": dict(record.usage),
        "pinned": record.pinned,
        "created_at": record.created_at,
    }


@router.post(
    "/import",
    summary="Make a session from exported JSON lines",
    response_model=None,
    status_code=201,
    responses=answers(201, ImportShape, errors=(400, 409, 413, 415, 422)),
    openapi_extra={"requestBody": {"required": True, "content": {LINES: {"schema": {"type": "string"}}}}},
)
async def import_session(
    request: Request,
    caller: Caller,
    id: Annotated[
        str | None, Query(pattern=r"^[A-Za-z0-9_.:@/+=-]{1,128}$", description="Another id for the new session.")
    ] = None,
) -> Response:
    """Tool calls and outputs are paired anew; token ids and summaries are made when needed: a file's are not trusted,
    and `imported` says how many compactions were left out. Pins have the budget that they have one by one. All or
    nothing."""
    gateway = gateway_of(request)
    limit, pause_s = gateway.settings.max_image_body_bytes, gateway.settings.body_timeout_s
    body = await read_body(request, limit, pause_s=pause_s, types=IMPORT_TYPES)
    head, turns, left_out = await asyncio.to_thread(parse_lines, body)
    new = _new_session(gateway, caller, head, id)
    ask = Ask(new.model, (), new.system, tools=tuple(dict(tool) for tool in new.tools))
    _check_sizes(gateway, new.model, turns)
    pinned = frozenset(turn.id for turn in turns if turn.pinned)
    await check_pinned(gateway.room, ask, [turn.standing() for turn in turns], pinned)
    try:
        made = await create(gateway, caller, new)
    except DuplicateId:
        raise Conflict(f"there is a session {new.id!r} already", code="session_exists", param="id") from None
    try:
        await _write(gateway, made, turns, head.get("head_turn_id"))
    except BaseException:
        await gateway.store.delete_session(caller.tenant_id, made.id)
        raise
    await gateway.store.note(line_of(request, caller, "session.import", made.id, turns=len(turns)))
    imported = {"turns": len(turns), "compactions_left_out": left_out}
    return session_response(await session_of(gateway, caller, made.id), 201, imported=imported)


def _check_sizes(gateway: Gateway, model: str, turns: list[ImportedTurn]) -> None:
    """Raises TooLarge for a text that the tokenizer would refuse: no turn could follow it, and no compaction."""
    tokens = gateway.models.tokens(model)
    if tokens is None:
        return
    limit = tokens.max_bytes
    for turn in turns:
        size = max((len(item.text.encode()) for item in (*turn.input, *turn.output)), default=0)
        if size > limit:
            raise TooLarge(
                f"turn {turn.id[:64]!r} holds a text of {size} bytes; at most {limit} are tokenized for {model[:100]}",
                details={"bytes": size, "limit": limit},
            )


def _new_session(gateway: Gateway, caller: Identity, head: Mapping[str, Any], new_id: str | None) -> NewSession:
    names = ("id", "model", "system", "tools", "title", "user_ref", "metadata", "policy")
    asked = validated(SessionCreate, {k: head[k] for k in names if head.get(k) is not None})
    if asked.model is None:
        raise BadRequest("line 1: model is missing", code="invalid_import")
    check_summariser(gateway, asked.policy)
    return NewSession(
        id=new_id or asked.id or gateway.new_id("sess"),
        tenant_id=caller.tenant_id,
        model=asked.model,
        system=asked.system,
        tools=tools_of(asked.tools),
        title=asked.title,
        user_ref=asked.user_ref,
        metadata=asked.metadata or {},
        policy=plain(asked.policy) or {},
    )


async def _write(gateway: Gateway, session: SessionRecord, turns: list[ImportedTurn], head: Any) -> None:
    """Each turn begun and finished, in the order of the file; ids are new, so that a file can be imported twice."""
    ids: dict[str | None, str | None] = {None: None}
    meanings: dict[str | None, bytes] = {None: root_meaning(session.system)}
    for turn in turns:
        new_id = ids[turn.id] = gateway.new_id("turn")
        begun = await gateway.store.begin_turn(
            BeginTurn(
                tenant_id=session.tenant_id,
                session_id=session.id,
                turn_id=new_id,
                owner=gateway.registry.owner,
                lease_s=gateway.settings.lease_s,
                input=turn.input,
                model=turn.model,
                parent=ids[turn.parent_id],
            )
        )
        if not isinstance(begun, Begun):
            raise Conflict("the session was used while it was being imported", code="session_busy")
        meanings[turn.id] = meaning(meanings[turn.parent_id], (*turn.input, *turn.output))
        await gateway.store.finish_turn(
            FinishTurn(
                tenant_id=session.tenant_id,
                session_id=session.id,
                turn_id=new_id,
                fence=begun.fence,
                status=turn.status,
                output=turn.output,
                finish_reason=turn.finish_reason,
                tokens=None,
                meaning=meanings[turn.id] if turn.status == "completed" else None,
                usage=turn.usage,
                placement={},
                prefix_report={},
                metadata={"imported": True, TAIL: {"open_calls": dict(turn.open_calls)}},
                move_head=turn.id == head,
            )
        )
        if turn.pinned:
            await gateway.store.pin_turn(session.tenant_id, session.id, new_id, True)
