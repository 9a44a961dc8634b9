"""`/admin/v1/keys`: API keys of all tenants, made, rotated and revoked while all runs. A key itself is told once."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.auditing import line_of, refusals_noted
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.operator_shapes import (
    Cursor,
    KeyCreate,
    KeyList,
    KeyRevoke,
    KeyRotate,
    KeyShape,
    Limit,
    NewKeyShape,
    RotatedShape,
    bad_cursor,
    page_json,
)
from gateway.api.sessions import json_response
from gateway.api.state import Gateway, gateway_of
from gateway.errors import Conflict, NotFound
from gateway.shown import key_json
from gateway.store.audit_records import Detail
from gateway.store.key_records import KeyOver, KeyRecord, LastAdminKey, NoTenant
from gateway.tenancy import ID_LENGTH, Identity

router = APIRouter(prefix="/admin/v1/keys", tags=["Keys"])
Operator = Annotated[Identity, Depends(needs("admin"))]
KEY_ID = re.compile(r"tk-[A-Za-z0-9_-]{8}")
OfTenant = Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Only the keys of this tenant.")]


async def _named(gateway: Gateway, key_id: str) -> KeyRecord:
    """Raises NotFound, which repeats no more of what came than a key's id has."""
    found = await gateway.store.key_named(key_id) if KEY_ID.fullmatch(key_id) else None
    if found is None:
        raise _no_key(key_id)
    return found


def _no_key(key_id: str) -> NotFound:
    return NotFound(f"no key {key_id[:ID_LENGTH]!r}", code="key_not_found", param="key_id")


@router.get(
    "", summary="The API keys, newest first", response_model=None, responses=answers(200, KeyList, errors=(400,))
)
async def list_keys(
    request: Request, caller: Operator, tenant: OfTenant = None, limit: Limit = 20, cursor: Cursor = None
) -> Response:
    """In every state: those that are over stay, to be seen in `state`."""
    gateway = gateway_of(request)
    try:
        page = await gateway.store.list_keys(tenant, limit=limit, cursor=cursor)
    except ValueError as error:
        raise bad_cursor(error) from None
    now = gateway.clock()
    return json_response(page_json([key_json(key, now) for key in page.keys], page.next_cursor))


@router.post(
    "",
    status_code=201,
    summary="Make an API key",
    response_model=None,
    responses=answers(201, NewKeyShape, errors=(400, 404, 413, 415)),
    openapi_extra=body_of(KeyCreate),
)
async def create_key(request: Request, caller: Operator) -> Response:
    """`key` of the answer is the key itself: its digest alone is stored, and it cannot be told again."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings)
    asked, now = validated(KeyCreate, raw), gateway.clock()
    key, record = gateway.access.new_key(
        tenant_id=asked.tenant,
        name=asked.name,
        scopes=frozenset(asked.scopes),
        expires_at=None if asked.ttl_seconds is None else now + asked.ttl_seconds,
    )
    details = {"scopes": " ".join(sorted(record.scopes)), "expires_at": record.expires_at}
    line = line_of(request, caller, "key.create", record.id, tenant_id=asked.tenant, **details)
    try:
        await gateway.store.add_key(record, new_tenant=False, line=line)
    except NoTenant as error:
        message = f"{error}: POST /admin/v1/tenants makes one"
        raise NotFound(message, code="tenant_not_found", param="tenant") from error
    return _told_once({**key_json(record, now), "key": key}, 201)


@router.get("/{key_id}", summary="One API key", response_model=None, responses=answers(200, KeyShape, errors=(404,)))
async def get_key(request: Request, caller: Operator, key_id: str) -> Response:
    gateway = gateway_of(request)
    return json_response(key_json(await _named(gateway, key_id), gateway.clock()))


@router.post(
    "/{key_id}/rotate",
    status_code=201,
    summary="Make a new key in the place of one",
    response_model=None,
    responses=answers(201, RotatedShape, errors=(400, 404, 409, 413, 415)),
    openapi_extra=body_of(KeyRotate, required=False),
)
async def rotate_key(request: Request, caller: Operator, key_id: str) -> Response:
    """With the same tenant, name, scopes and end. The old one goes on working for `grace_s`, and then ends; each names
    the other. `key` of the answer is the new key, told this once."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, empty=True)
    asked, old = validated(KeyRotate, raw), await _named(gateway, key_id)
    grace_s = gateway.settings.key_grace_s if asked.grace_s is None else asked.grace_s
    key, new = gateway.access.successor(old)
    details: dict[str, Detail] = {"replaced_by": new.id, "grace_s": grace_s, "force": asked.force}
    line = line_of(request, caller, "key.rotate", old.id, tenant_id=old.tenant_id, **details)
    refused = line_of(request, caller, "key.rotate", old.id, tenant_id=old.tenant_id)
    async with refusals_noted(gateway.store, refused):
        try:
            both = await gateway.store.rotate_key(old, new, grace_s=grace_s, force=asked.force, line=line)
        except KeyOver as error:
            raise _over(error) from error
        except LastAdminKey as error:
            hint = "with a grace of 0 s it would end before the new one was tried: give it a grace, or `force`"
            raise Conflict(f"{error}; {hint}", code="last_admin_key") from error
    if both is None:
        raise _no_key(key_id)
    gateway.access.forget(old.id)
    now = gateway.clock()
    return _told_once({**key_json(both[1], now), "key": key, "old": key_json(both[0], now)}, 201)


@router.post(
    "/{key_id}/revoke",
    summary="End an API key, for good",
    response_model=None,
    responses=answers(200, KeyShape, errors=(400, 404, 409, 413, 415)),
    openapi_extra=body_of(KeyRevoke, required=False),
)
async def revoke_key(request: Request, caller: Operator, key_id: str) -> Response:
    """At once here, within two seconds at every other gateway of the database. Said twice, it changes nothing."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings, empty=True)
    asked, key = validated(KeyRevoke, raw), await _named(gateway, key_id)
    line = line_of(request, caller, "key.revoke", key.id, tenant_id=key.tenant_id, force=asked.force)
    async with refusals_noted(gateway.store, line):
        try:
            revoked = await gateway.store.revoke_key(key.tenant_id, key.id, force=asked.force, line=line)
        except LastAdminKey as error:
            raise Conflict(f"{error}: make another one first, or `force`", code="last_admin_key") from error
    if revoked is None:
        raise _no_key(key_id)
    gateway.access.forget(key.id)
    return json_response(key_json(revoked, gateway.clock()))


def _over(error: KeyOver) -> Conflict:
    if error.state == "ending":
        return Conflict(f"{error}: {error.key.replaced_by} was made for it already", code="key_rotated")
    return Conflict(f"{error}: make another one", code="key_over")


def _told_once(told: dict[str, Any], status: int) -> Response:
    return json_response(told, status, {"cache-control": "no-store"})
