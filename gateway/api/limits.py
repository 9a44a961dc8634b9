"""`/admin/v1/limits`: what a tenant, or one of its keys, may use; changed while all gateways serve."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from engines.contract import TellsKept
from gateway.api.access import needs
from gateway.api.auditing import line_of
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.state import Gateway, gateway_of
from gateway.errors import NotFound
from gateway.store.limit_records import LIMITS, MOST, NONE, TENANT, Holder, Limited, Limits
from gateway.tenancy import Identity

router = APIRouter(prefix="/admin/v1/limits", tags=["Admin"])
Operator = Annotated[Identity, Depends(needs("admin"))]
Tenant = Annotated[str, Path(max_length=64, description="The tenant's name.")]
Key = Annotated[str, Path(max_length=64, description="The key's first characters.")]

Number = Annotated[int, Field(ge=0, le=MOST)]


class LimitFields(BaseModel):
    """What is not named, or null, has no limit. 0 lets nothing through."""

    model_config = ConfigDict(extra="forbid")

    requests_per_minute: Number | None = Field(None, description="Requests that ask a model for something.")
    tokens_per_minute: Number | None = Field(None, description="Prompt and output tokens.")
    concurrent_turns: Number | None = Field(None, description="Turns that run at once.")
    sessions: Number | None = Field(None, description="Sessions that are stored.")
    stored_bytes: Number | None = Field(None, description="Bytes of their items and token ids.")
    month_tokens: Number | None = Field(None, description="Prompt and output tokens in a calendar month, UTC.")
    kv_bytes: Number | None = Field(None, description="Bytes of K/V that replicas keep of their sessions.")


class LimitsShape(BaseModel):
    object: str
    tenant: str
    key: str | None = Field(description="null: the tenant's own, which all of its keys share.")
    limits: LimitFields
    updated_at: float | None


class LimitsList(BaseModel):
    object: str
    data: list[LimitsShape]
    counted_in: str = Field(description="memory (each gateway counts its own), database, or redis.")
    kv_untold: list[str] = Field(description="Replicas that do not tell how much they keep of a session.")


assert tuple(LimitFields.model_fields) == LIMITS


@router.get("", summary="All limits", response_model=None, responses=answers(200, LimitsList))
async def list_limits(request: Request, caller: Operator) -> Response:
    gateway = gateway_of(request)
    found = await gateway.store.list_limits()
    where = gateway.settings.counted_in
    counted = where if where in ("memory", "database") else "redis"
    untold = sorted(replica.name for replica in gateway.fleet if not isinstance(replica.engine, TellsKept))
    data = [one.as_json() for one in found]
    return _json({"object": "list", "data": data, "counted_in": counted, "kv_untold": untold})


@router.get(
    "/{tenant}", summary="A tenant's limits", response_model=None, responses=answers(200, LimitsShape, errors=(404,))
)
async def get_tenant(request: Request, caller: Operator, tenant: Tenant) -> Response:
    return await _get(gateway_of(request), Holder(tenant))


@router.get(
    "/{tenant}/keys/{key}",
    summary="A key's limits",
    response_model=None,
    responses=answers(200, LimitsShape, errors=(404,)),
)
async def get_key(request: Request, caller: Operator, tenant: Tenant, key: Key) -> Response:
    return await _get(gateway_of(request), Holder(tenant, key))


@router.put(
    "/{tenant}",
    summary="Set a tenant's limits",
    response_model=None,
    responses=answers(200, LimitsShape, errors=(400, 404, 413, 415)),
    openapi_extra=body_of(LimitFields),
)
async def put_tenant(request: Request, caller: Operator, tenant: Tenant) -> Response:
    """In place of those that were. Every gateway heeds them within two seconds."""
    return await _put(request, caller, Holder(tenant))


@router.put(
    "/{tenant}/keys/{key}",
    summary="Set a key's limits",
    response_model=None,
    responses=answers(200, LimitsShape, errors=(400, 404, 413, 415)),
    openapi_extra=body_of(LimitFields),
)
async def put_key(request: Request, caller: Operator, tenant: Tenant, key: Key) -> Response:
    """Beside its tenant's: a request has to fit both."""
    return await _put(request, caller, Holder(tenant, key))


@router.delete(
    "/{tenant}",
    summary="Remove a tenant's limits",
    response_model=None,
    responses=answers(200, LimitsShape, errors=(404,)),
)
async def delete_tenant(request: Request, caller: Operator, tenant: Tenant) -> Response:
    return await _delete(request, caller, Holder(tenant))


@router.delete(
    "/{tenant}/keys/{key}",
    summary="Remove a key's limits",
    response_model=None,
    responses=answers(200, LimitsShape, errors=(404,)),
)
async def delete_key(request: Request, caller: Operator, tenant: Tenant, key: Key) -> Response:
    return await _delete(request, caller, Holder(tenant, key))


async def _get(gateway: Gateway, holder: Holder) -> Response:
    await _check(gateway, holder)
    found = [one for one in await gateway.store.list_limits(holder.tenant_id) if one.key_id == holder.key_id]
    one = found[0] if found else Limited(holder.tenant_id, holder.key_id, NONE, None)
    return _json(one.as_json())


async def _put(request: Request, caller: Identity, holder: Holder) -> Response:
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings)
    wanted = Limits(**validated(LimitFields, raw).model_dump())
    await _check(gateway, holder)
    line = line_of(request, caller, "limits.set", holder.key_id or holder.tenant_id, tenant_id=holder.tenant_id)
    await gateway.store.set_limits(holder, wanted, line=line)
    await gateway.room.gate.refresh()
    return await _get(gateway, holder)


async def _delete(request: Request, caller: Identity, holder: Holder) -> Response:
    gateway = gateway_of(request)
    await _check(gateway, holder)
    line = line_of(request, caller, "limits.remove", holder.key_id or holder.tenant_id, tenant_id=holder.tenant_id)
    await gateway.store.set_limits(holder, NONE, line=line)
    await gateway.room.gate.refresh()
    return await _get(gateway, holder)


async def _check(gateway: Gateway, holder: Holder) -> None:
    """Raises NotFound: a limit for nobody would look as if it held."""
    if await gateway.store.get_tenant(holder.tenant_id) is None:
        raise NotFound(f"no tenant {holder.tenant_id[:64]!r}", code="tenant_not_found", param="tenant")
    if holder.key_id == TENANT:
        return
    key = await gateway.store.key_named(holder.key_id)
    if key is None or key.tenant_id != holder.tenant_id:
        raise NotFound(f"the tenant has no key {holder.key_id[:64]!r}", code="key_not_found", param="key")


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
