"""`/v1/erasures`: erase all that an end user's sessions hold, and read the receipts of erasures."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.auditing import line_of
from gateway.api.body import json_object, validated
from gateway.api.describe import answers, body_of
from gateway.api.schemas import ErasureAsked, ErasureList, ErasureShape
from gateway.api.sessions import Limit, json_response
from gateway.api.shapes import receipt_json
from gateway.api.state import gateway_of
from gateway.errors import BadRequest, NotFound
from gateway.sessions.erasing import erase_user
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/erasures", tags=["Erasures"])
Caller = Annotated[Identity, Depends(needs("sessions"))]
Reader = Annotated[Identity, Depends(needs("sessions", "read"))]
ERASURE_ID = re.compile(r"(ers_)?[0-9a-f]{32}")


@router.post(
    "",
    status_code=200,
    summary="Erase an end user: every session, with all that was kept of it anywhere",
    response_model=None,
    responses=answers(200, ErasureShape, errors=(400, 413, 415)) | {202: answers(202, ErasureShape)[202]},
    openapi_extra=body_of(ErasureAsked),
)
async def erase(request: Request, caller: Caller) -> Response:
    """What runs is stopped first. 200: nothing is left. 202: a replica is away, and is asked until it answers; the
    receipt says which. Asked again meanwhile, the same receipt goes on; asked again later, a new one finds nothing."""
    gateway = gateway_of(request)
    _, raw = await json_object(request, gateway.settings)
    user = validated(ErasureAsked, raw).user
    subject = gateway.subject_of(caller.tenant_id, user)
    line = line_of(request, caller, "user.erase", subject)
    erasing = erase_user(gateway.room, gateway.places, caller.tenant_id, user, subject, line=line)
    receipt = await gateway.registry.see_through(erasing, lambda _: None)
    return json_response(receipt_json(receipt), 200 if receipt.status == "done" else 202)


@router.get(
    "",
    summary="Receipts of erasures, newest first",
    response_model=None,
    responses=answers(200, ErasureList, errors=(400,)),
)
async def list_erasures(
    request: Request,
    caller: Reader,
    limit: Limit = 20,
    cursor: Annotated[str | None, Query(max_length=1024)] = None,
    user: Annotated[str | None, Query(max_length=256, description="Those of this end user.")] = None,
    status: Annotated[str | None, Query(pattern="^(erasing|pending|done)$")] = None,
) -> Response:
    """Of sessions that were deleted or whose time was over, and of end users."""
    gateway = gateway_of(request)
    if cursor is not None and "\x00" in cursor:
        raise BadRequest("cursor holds a NUL character", code="invalid_unicode", param="cursor")
    subject = gateway.subject_of(caller.tenant_id, user) if user is not None else None
    try:
        page = await gateway.store.list_receipts(
            caller.tenant_id, limit=limit, cursor=cursor, subject=subject, status=status
        )
    except ValueError as error:
        raise BadRequest(f"cursor: {error}", code="invalid_cursor", param="cursor") from None
    data = [receipt_json(receipt) for receipt in page.receipts]
    more = page.next_cursor is not None
    return json_response({"object": "list", "data": data, "has_more": more, "next_cursor": page.next_cursor})


@router.get(
    "/{erasure_id}",
    summary="One receipt",
    response_model=None,
    responses=answers(200, ErasureShape, errors=(404,)),
)
async def get_erasure(request: Request, caller: Reader, erasure_id: str) -> Response:
    receipt = None
    if ERASURE_ID.fullmatch(erasure_id):
        receipt = await gateway_of(request).store.get_receipt(caller.tenant_id, erasure_id)
    if receipt is None:
        raise NotFound(f"no erasure {erasure_id[:128]!r}", code="erasure_not_found", param="erasure_id")
    return json_response(receipt_json(receipt))
