"""`/admin/v1/audit`: who did what, across tenants."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.describe import answers
from gateway.api.operator_shapes import AuditList, Cursor, Limit, bad_cursor, page_json
from gateway.api.sessions import Moment, json_response
from gateway.api.state import gateway_of
from gateway.shown import audit_json
from gateway.store.audit_records import AuditFilter
from gateway.tenancy import Identity

router = APIRouter(prefix="/admin/v1/audit", tags=["Audit"])
Operator = Annotated[Identity, Depends(needs("admin"))]
OfTenant = Annotated[
    str | None, Query(pattern=r"^[A-Za-z0-9_.-]{0,64}$", description="Of this tenant; empty: of none of them.")
]
OfAction = Annotated[str | None, Query(pattern=r"^[a-z_.]{1,64}$", description="As `key.rotate`.")]


@router.get(
    "", summary="The audit log, newest first", response_model=None, responses=answers(200, AuditList, errors=(400,))
)
async def list_audit(
    request: Request,
    caller: Operator,
    tenant: OfTenant = None,
    action: OfAction = None,
    since: Moment = None,
    until: Moment = None,
    limit: Limit = 20,
    cursor: Cursor = None,
) -> Response:
    """From `since` on and before `until`, both in seconds since 1970."""
    filter = AuditFilter(tenant, action, since, until)
    try:
        page = await gateway_of(request).store.list_audit(limit=limit, cursor=cursor, filter=filter)
    except ValueError as error:
        raise bad_cursor(error) from None
    return json_response(page_json([audit_json(record) for record in page.records], page.next_cursor))
