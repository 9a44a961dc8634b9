"""`/v1/sessions`: create, list, read, change, archive and erase conversations."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.asked import plain, tools_of
from gateway.api.auditing import line_of
from gateway.api.body import json_object, validated
from gateway.api.chat import idempotency_key_of
from gateway.api.describe import answers, body_of
from gateway.api.schemas import Policy, ReceiptShape, SessionCreate, SessionList, SessionPatch, SessionShape
from gateway.api.shapes import deleted_json, session_json
from gateway.api.state import Gateway, gateway_of
from gateway.api.stored import create
from gateway.errors import (
    BadRequest,
    Conflict,
    NotFound,
    PreconditionFailed,
    PreconditionRequired,
    SessionBusy,
    Unprocessable,
)
from gateway.sessions.erasing import erase_session
from gateway.sessions.recognise import SESSION_KEY
from gateway.store.audit_records import AuditLine
from gateway.store.records import (
    DuplicateId,
    NewSession,
    SessionChanges,
    SessionFilter,
    SessionRecord,
    SessionRuns,
    VersionConflict,
)
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions", tags=["Sessions"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
Reader = Annotated[Identity, Depends(needs("sessions", "read"))]
REQUEST_MARK = "request_sha256"  # in the policy of a session made under an Idempotency-Key; not shown


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def shown(record: SessionRecord) -> dict[str, Any]:
    told = session_json(record)
    told["policy"].pop(REQUEST_MARK, None)
    return told


def session_response(record: SessionRecord, status: int = 200, **more: Any) -> Response:
    return json_response({**shown(record), **more}, status, {"etag": f'"{record.version}"'})


async def session_of(gateway: Gateway, caller: Identity, session_id: str) -> SessionRecord:
    session = None
    if SESSION_KEY.fullmatch(session_id):  # the database never sees what cannot be an id
        session = await gateway.store.get_session(caller.tenant_id, session_id)
    if session is None:
        raise no_session(session_id)
    return session


def no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id[:128]!r}", code="session_not_found", param="session_id")


def check_served(gateway: Gateway, model: str | None) -> None:
    """Raises NotFound for a model that none of the known replicas serves."""
    served = gateway.fleet.models
    if model is not None and served and model not in served:
        raise NotFound(
            f"the model {model[:100]!r} is not served here; served are: {', '.join(served)}",
            code="model_not_found",
            param="model",
        )


def check_summariser(gateway: Gateway, policy: Policy | None) -> None:
    """Raises BadRequest for a summariser that none of the known replicas serves. One that goes away later is no error:
    summaries are extracted then."""
    served, named = gateway.fleet.models, policy.summariser if policy is not None else None
    if named is not None and served and named not in served:
        raise BadRequest(
            f"policy.summariser: the model {named[:100]!r} is not served here; served are: {', '.join(served)}",
            code="model_not_found",
            param="policy.summariser",
        )


@router.post(
    "",
    status_code=201,
    summary="Create a session",
    response_model=None,
    responses=answers(201, SessionShape, errors=(400, 404, 409, 413, 415, 422)),
    openapi_extra=body_of(SessionCreate, required=False),
)
async def create_session(request: Request, caller: Caller) -> Response:
    """With an Idempotency-Key a repeated request answers with the session that the first one made."""
    gateway = gateway_of(request)
    body, raw = await json_object(request, gateway.settings, empty=True)
    asked = validated(SessionCreate, raw)
    check_served(gateway, asked.model)
    check_summariser(gateway, asked.policy)
    key = idempotency_key_of(request)
    session_id = asked.id
    if session_id is None:
        session_id = gateway.key_id_of(caller.tenant_id, key) if key is not None else gateway.new_id("sess")
    policy = plain(asked.policy) or {}
    if key is not None:
        policy[REQUEST_MARK] = hashlib.sha256(body).hexdigest()
    new = NewSession(
        id=session_id,
        tenant_id=caller.tenant_id,
        model=asked.model or default_model(gateway),
        system=asked.system,
        tools=tools_of(asked.tools),
        title=asked.title,
        user_ref=asked.user_ref,
        metadata=asked.metadata or {},
        policy=policy,
        origin="api",
        expires_at=gateway.clock() + asked.ttl_seconds if asked.ttl_seconds is not None else None,
    )
    try:
        return session_response(await create(gateway, caller, new), 201)
    except DuplicateId:
        existing = await session_of(gateway, caller, session_id)
        if key is None:
            raise Conflict(f"there is a session {session_id!r} already", code="session_exists", param="id") from None
        if existing.policy.get(REQUEST_MARK) != policy[REQUEST_MARK]:
            raise Unprocessable(
                "this Idempotency-Key was used with another request body",
                code="idempotency_key_reused",
                param="Idempotency-Key",
            ) from None
        return session_response(existing, 201)


def default_model(gateway: Gateway) -> str:
    models = gateway.fleet.models
    if not models:
        return gateway.settings.model
    return gateway.settings.model if gateway.settings.model in models else models[0]


Limit = Annotated[int, Query(ge=1, le=100, description="Most entries of one page.")]
Moment = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="Seconds since 1970.")]
Word = Annotated[str | None, Query(max_length=256)]
BY_METADATA = {
    "name": "metadata",
    "in": "query",
    "style": "deepObject",
    "explode": True,
    "description": "Only sessions with this in their metadata: metadata[KEY]=VALUE.",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}


@router.get(
    "",
    summary="List sessions, newest first",
    response_model=None,
    responses=answers(200, SessionList, errors=(400,)),
    openapi_extra={"parameters": [BY_METADATA]},
)
async def list_sessions(
    request: Request,
    caller: Reader,
    limit: Limit = 20,
    cursor: Annotated[str | None, Query(max_length=1024)] = None,
    user_ref: Word = None,
    status: Annotated[str | None, Query(pattern="^(idle|running)$")] = None,
    q: Annotated[str | None, Query(max_length=256, description="Part of the title or the id.")] = None,
    created_after: Moment = None,
    created_before: Moment = None,
    updated_after: Moment = None,
    updated_before: Moment = None,
    archived: Annotated[bool, Query(description="Show archived sessions too.")] = False,
) -> Response:
    metadata = {k[9:-1]: v for k, v in request.query_params.items() if k.startswith("metadata[") and k.endswith("]")}
    for value in (cursor, user_ref, q, *metadata, *metadata.values()):
        if value is not None and "\x00" in value:
            raise BadRequest("a query parameter holds a NUL character", code="invalid_unicode")
    found = SessionFilter(
        user_ref, status, created_after, created_before, updated_after, updated_before, metadata, q, archived
    )
    gateway = gateway_of(request)
    try:
        page = await gateway.store.list_sessions(caller.tenant_id, limit=limit, cursor=cursor, filter=found)
    except ValueError as error:
        raise BadRequest(f"cursor: {error}", code="invalid_cursor", param="cursor") from None
    data = [shown(s) for s in page.sessions]
    more = page.next_cursor is not None
    return json_response({"object": "list", "data": data, "has_more": more, "next_cursor": page.next_cursor})


@router.get(
    "/{session_id}",
    summary="One session",
    response_model=None,
    responses=answers(200, SessionShape, errors=(404,)),
)
async def get_session(request: Request, caller: Reader, session_id: str) -> Response:
    return session_response(await session_of(gateway_of(request), caller, session_id))


@router.patch(
    "/{session_id}",
    summary="Change a session",
    response_model=None,
    responses=answers(200, SessionShape, errors=(400, 404, 412, 413, 415, 428)),
    openapi_extra=body_of(SessionPatch),
)
async def patch_session(request: Request, caller: Caller, session_id: str) -> Response:
    """Needs If-Match with the session's ETag, so that no change of another client is lost."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings)
    asked = validated(SessionPatch, raw)
    session = await session_of(gateway, caller, session_id)
    version = _version(request.headers.get("if-match"), session)
    check_served(gateway, asked.model)
    check_summariser(gateway, asked.policy)
    changes = _changes(asked, raw, session, gateway)
    if not changes:
        return session_response(session)
    try:
        changed = await gateway.store.update_session(caller.tenant_id, session_id, version, SessionChanges(changes))
        gateway.registry.heads.forget(caller.tenant_id, session_id)
    except VersionConflict as error:
        raise PreconditionFailed(
            f"the session is at version {error.current}, not {version}", param="If-Match"
        ) from None
    if changed is None:
        raise no_session(session_id)
    return session_response(changed)


def _version(if_match: str | None, session: SessionRecord) -> int | None:
    """The version that If-Match names; None for `*`."""
    if if_match is None:
        raise PreconditionRequired(
            f'send If-Match: "{session.version}" (the ETag of the version you read)', param="If-Match"
        )
    if if_match.strip() == "*":
        return None
    tag = if_match.strip().removeprefix("W/").strip('"')
    if not tag.isascii() or not tag.isdigit() or len(tag) > 15:
        raise PreconditionFailed(f"the session is at version {session.version}", param="If-Match")
    return int(tag)


def _changes(asked: SessionPatch, raw: dict[str, Any], session: SessionRecord, gateway: Gateway) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name in ("title", "system", "metadata", "tools", "policy", "model"):
        if name in raw:
            changes[name] = getattr(asked, name)
    if "model" in changes and changes["model"] is None:
        raise BadRequest("model cannot be empty", param="model")
    if "tools" in changes:
        changes["tools"] = tools_of(asked.tools)
    if "metadata" in changes:
        changes["metadata"] = asked.metadata or {}
    if "policy" in changes:
        mark = session.policy.get(REQUEST_MARK)
        changes["policy"] = {**(plain(asked.policy) or {}), **({REQUEST_MARK: mark} if mark else {})}
    if "ttl_seconds" in raw:
        changes["expires_at"] = gateway.clock() + asked.ttl_seconds if asked.ttl_seconds is not None else None
    return changes


@router.post(
    "/{session_id}/archive",
    summary="Put a session aside: hidden from lists, without turns, its KV given up",
    response_model=None,
    responses=answers(200, SessionShape, errors=(404, 409)),
)
async def archive_session(request: Request, caller: Caller, session_id: str) -> Response:
    """Its words stay; what replicas keep of it goes. Its own time to live goes on, the default one stands still."""
    gateway = gateway_of(request)
    await session_of(gateway, caller, session_id)
    line = line_of(request, caller, "session.archive", session_id)
    try:
        session = await gateway.store.archive_session(caller.tenant_id, session_id, line=line)
    except SessionRuns:
        raise SessionBusy("the session has a turn that runs: archive it when that is done, or cancel it") from None
    gateway.registry.heads.forget(caller.tenant_id, session_id)
    if session is None:
        raise no_session(session_id)
    await gateway.places.soon()
    return session_response(session)


@router.post(
    "/{session_id}/unarchive",
    summary="Take an archived session up again",
    response_model=None,
    responses=answers(200, SessionShape, errors=(404,)),
)
async def unarchive_session(request: Request, caller: Caller, session_id: str) -> Response:
    """Its next turn computes its KV anew."""
    gateway = gateway_of(request)
    await session_of(gateway, caller, session_id)
    line = line_of(request, caller, "session.unarchive", session_id)
    session = await gateway.store.unarchive_session(caller.tenant_id, session_id, line=line)
    gateway.registry.heads.forget(caller.tenant_id, session_id)
    if session is None:
        raise no_session(session_id)
    return session_response(session)


@router.delete(
    "/{session_id}",
    summary="Erase a session, here and in the engines",
    response_model=None,
    responses=answers(200, ReceiptShape, errors=(404,)),
)
async def delete_session(request: Request, caller: Caller, session_id: str) -> Response:
    """A running turn is stopped; turns, items, ids and events go, and so does the KV that the engines keep. A receipt
    that is `pending` waits for replicas that are away: `GET /v1/erasures/{erasure_id}` says when they are done."""
    gateway = gateway_of(request)
    await session_of(gateway, caller, session_id)
    line = line_of(request, caller, "session.delete", session_id)
    receipt = await erased(gateway, caller.tenant_id, session_id, line)
    if receipt is None:
        raise no_session(session_id)
    return json_response(receipt)


async def erased(gateway: Gateway, tenant_id: str, session_id: str, line: AuditLine) -> dict[str, Any] | None:
    """Erase a session everywhere -> its receipt. None: there is no such session. `line`: for the audit log."""
    receipt = await gateway.registry.see_through(
        erase_session(gateway.room, gateway.places, tenant_id, session_id, line=line), lambda _: None
    )
    return deleted_json(receipt) if receipt is not None else None
