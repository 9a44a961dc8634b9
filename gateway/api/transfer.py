"""A session as JSON lines, and back: one line for the session, then one for each turn, parents before children.

    {"object": "session", "format": 1, …}
    {"object": "turn", "id", "parent_id", "seq", "status", "input": [items], "output": [items], "usage", …}

An import checks every line before anything is written. Token ids are not exported: they are made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from compression.conversation import Item, TurnStatus
from gateway.api.access import needs
from gateway.api.asked import plain, tools_of
from gateway.api.body import parse_object, read_body, validated
from gateway.api.describe import answers
from gateway.api.schemas import SessionCreate, SessionShape
from gateway.api.sessions import REQUEST_MARK, session_of, session_response
from gateway.api.shapes import compaction_json
from gateway.api.state import Gateway, gateway_of
from gateway.errors import BadRequest, Conflict
from gateway.sessions.history import TAIL
from gateway.sessions.items import check_pairs, meaning, open_calls, parse_items, root_meaning
from gateway.store.records import BeginTurn, Begun, DuplicateId, FinishTurn, NewSession, SessionRecord, TurnRecord
from gateway.store.sessions import Store
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions", tags=["Sessions"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
FORMAT = 1
PAGE = 100
STATUS: dict[str, TurnStatus] = {
    "completed": "completed",
    "incomplete": "incomplete",
    "failed": "failed",
    "in_progress": "incomplete",
}
LINES = "application/x-ndjson"
IMPORT_TYPES = frozenset({LINES, "application/jsonl", "application/json"})
HEAD_FIELDS = {"object", "format", "id", "model", "system", "tools", "title", "user_ref", "metadata", "policy"}
HEAD_FIELDS |= {"head_turn_id", "created_at"}
TURN_FIELDS = {"object", "id", "parent_id", "seq", "status", "model", "finish_reason", "input", "output", "usage"}
TURN_FIELDS |= {"created_at", "pinned"}
COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens")
MAX_TURNS = 10_000


@router.get(
    "/{session_id}/export",
    summary="The whole session as JSON lines",
    response_model=None,
    responses=answers(200, None, media_type=LINES, errors=(404,)),
)
async def export(request: Request, caller: Caller, session_id: str) -> Response:
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
    responses=answers(201, SessionShape, errors=(400, 409, 413, 415, 422)),
    openapi_extra={"requestBody": {"required": True, "content": {LINES: {"schema": {"type": "string"}}}}},
)
async def import_session(
    request: Request,
    caller: Caller,
    id: Annotated[
        str | None, Query(pattern=r"^[A-Za-z0-9_.:@/+=-]{1,128}$", description="Another id for the new session.")
    ] = None,
) -> Response:
    """Tool calls and outputs are paired anew; token ids and summaries are made when needed. All or nothing."""
    gateway = gateway_of(request)
    limit, pause_s = gateway.settings.max_image_body_bytes, gateway.settings.body_timeout_s
    body = await read_body(request, limit, pause_s=pause_s, types=IMPORT_TYPES)
    head, turns = await asyncio.to_thread(parse_lines, body)
    new = _new_session(gateway, caller, head, id)
    try:
        made = await gateway.store.create_session(new)
    except DuplicateId:
        raise Conflict(f"there is a session {new.id!r} already", code="session_exists", param="id") from None
    try:
        await _write(gateway, made, turns, head.get("head_turn_id"))
    except BaseException:
        await gateway.store.delete_session(caller.tenant_id, made.id)
        raise
    return session_response(await session_of(gateway, caller, made.id), 201)


@dataclass(frozen=True, slots=True)
class ImportedTurn:
    id: str
    parent_id: str | None
    status: TurnStatus
    model: str
    finish_reason: str | None
    input: tuple[Item, ...]
    output: tuple[Item, ...]
    usage: Mapping[str, Any]
    open_calls: Mapping[str, str]
    pinned: bool = False


def parse_lines(body: bytes) -> tuple[dict[str, Any], list[ImportedTurn]]:
    """Every line checked. Raises BadRequest or Unprocessable that names the line."""
    lines = [line for line in body.split(b"\n") if line.strip()]
    if not lines:
        raise BadRequest("the body holds no lines", code="invalid_import")
    head = parse_object(lines[0])
    if head.get("object") != "session" or head.get("format") != FORMAT:
        raise BadRequest(f'line 1 must be the session, with "format": {FORMAT}', code="invalid_import")
    _check_fields(head, HEAD_FIELDS, "line 1")
    if len(lines) > MAX_TURNS + 1:
        raise BadRequest(f"the file has {len(lines) - 1} turns of at most {MAX_TURNS}", code="invalid_import")
    known: dict[str, ImportedTurn] = {}
    for number, line in enumerate(lines[1:], 2):
        raw = parse_object(line)
        if raw.get("object") == "compaction":
            continue  # a file's summaries are not trusted: they are made anew when needed
        turn = _parse_turn(raw, known, number, str(head.get("model")))
        known[turn.id] = turn
    if head.get("head_turn_id") is not None and head["head_turn_id"] not in known:
        raise BadRequest("line 1: head_turn_id names no turn of this file", code="invalid_import")
    return head, list(known.values())


def _parse_turn(raw: Mapping[str, Any], known: Mapping[str, ImportedTurn], number: int, model: str) -> ImportedTurn:
    where = f"line {number}"
    turn_id, parent_id = raw.get("id"), raw.get("parent_id")
    _check_fields(raw, TURN_FIELDS, where)
    if raw.get("object") != "turn" or not isinstance(turn_id, str) or not turn_id or turn_id in known:
        raise BadRequest(f"{where} must be a turn with an id of its own", code="invalid_import")
    if parent_id is not None and (not isinstance(parent_id, str) or parent_id not in known):
        raise BadRequest(f"{where}: parent_id names no earlier turn", code="invalid_import")
    status = STATUS.get(str(raw.get("status")))
    if status is None:
        raise BadRequest(f"{where}: status is completed, incomplete or failed", code="invalid_import")
    given = tuple(parse_items(raw.get("input"), param=f"{where}.input"))
    if not isinstance(raw.get("output"), list | None):
        raise BadRequest(f"{where}: output is a list of items", code="invalid_import")
    output = tuple(parse_items(raw["output"], param=f"{where}.output")) if raw.get("output") else ()
    if not isinstance(raw.get("model"), str | None):
        raise BadRequest(f"{where}: model is a string", code="invalid_import")
    waiting = dict(known[parent_id].open_calls) if parent_id is not None else {}
    check_pairs(waiting, given, param=f"{where}.input")
    answered = {item.payload["call_id"] for item in given if item.type == "function_call_output"}
    calls = {**{k: v for k, v in waiting.items() if k not in answered}, **open_calls((*given, *output))}
    usage = raw.get("usage")
    reason = raw.get("finish_reason")
    return ImportedTurn(
        turn_id,
        parent_id,
        status,
        (raw.get("model") or model)[:256],
        reason[:64] if isinstance(reason, str) else None,
        given,
        output,
        _usage(usage) if isinstance(usage, dict) else {},
        calls,
        raw.get("pinned") is True,
    )


def _check_fields(raw: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := next((name for name in raw if name not in known), None):
        shown = unknown[:64]
        raise BadRequest(f"{where}: {shown} is not a field here", code="unknown_field", param=shown)


def _usage(raw: Mapping[str, Any]) -> dict[str, int]:
    """The token counts among what the file says; other words are not ours."""
    return {name: value for name in COUNTS if type(value := raw.get(name)) is int and 0 <= value < 2**53}


def _new_session(gateway: Gateway, caller: Identity, head: Mapping[str, Any], new_id: str | None) -> NewSession:
    names = ("id", "model", "system", "tools", "title", "user_ref", "metadata", "policy")
    asked = validated(SessionCreate, {k: head[k] for k in names if head.get(k) is not None})
    if asked.model is None:
        raise BadRequest("line 1: model is missing", code="invalid_import")
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
