"""`/admin/v1/tenants`: whose sessions and keys there are."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.auditing import line_of, refusals_noted
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.operator_shapes import Cursor, Limit, TenantCreate, TenantList, TenantShape, bad_cursor, page_json
from gateway.api.sessions import json_response
from gateway.api.state import Gateway, gateway_of
from gateway.errors import Conflict, NotFound
from gateway.shown import tenant_json
from gateway.tenancy import TENANT, Identity

router = APIRouter(prefix="/admin/v1/tenants", tags=["Tenants"])
Operator = Annotated[Identity, Depends(needs("admin"))]


@router.get(
    "", summary="The tenants, newest first", response_model=None, responses=answers(200, TenantList, errors=(400,))
)
async def list_tenants(request: Request, caller: Operator, limit: Limit = 20, cursor: Cursor = None) -> Response:
    """`working_keys` counts the keys of each that are neither revoked nor over."""
    gateway = gateway_of(request)
    try:
        page = await gateway.store.list_tenants(limit=limit, cursor=cursor)
    except ValueError as error:
        raise bad_cursor(error) from None
    return json_response(page_json([tenant_json(tenant) for tenant in page.tenants], page.next_cursor))


@router.post(
    "",
    status_code=201,
    summary="Make a tenant",
    response_model=None,
    responses=answers(201, TenantShape, errors=(400, 409, 413, 415)),
    openapi_extra=body_of(TenantCreate),
)
async def create_tenant(request: Request, caller: Operator) -> Response:
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings)
    asked = validated(TenantCreate, raw)
    line = line_of(request, caller, "tenant.create", asked.id, tenant_id=asked.id)
    async with refusals_noted(gateway.store, line):
        if not await gateway.store.add_tenant(asked.id, asked.name or asked.id, line=line):
            raise Conflict(f"there is a tenant {asked.id!r} already", code="tenant_exists", param="id")
    return await _told(gateway, asked.id, 201)


@router.get("/{tenant}", summary="One tenant", response_model=None, responses=answers(200, TenantShape, errors=(404,)))
async def get_tenant(request: Request, caller: Operator, tenant: str) -> Response:
    return await _told(gateway_of(request), tenant, 200)


async def _told(gateway: Gateway, tenant_id: str, status: int) -> Response:
    found = await gateway.store.get_tenant(tenant_id) if re.fullmatch(TENANT, tenant_id) else None
    if found is None:
        raise NotFound(f"no tenant {tenant_id[:64]!r}", code="tenant_not_found", param="tenant")
    return json_response(tenant_json(found), status)
