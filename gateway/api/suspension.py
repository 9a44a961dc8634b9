"""`/v1/sessions/{session_id}/suspend` and `/resume`: where a session's KV lies at its replica."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.api.access import needs
from gateway.api.auditing import line_of
from gateway.api.describe import answers
from gateway.api.schemas import SuspendedShape
from gateway.api.sessions import json_response, session_of
from gateway.api.state import gateway_of
from gateway.sessions import suspending
from gateway.tenancy import Identity

router = APIRouter(prefix="/v1/sessions", tags=["Sessions"])
Caller = Annotated[Identity, Depends(needs("sessions"))]


@router.post(
    "/{session_id}/suspend",
    summary="Put a session's KV down, off the device of its replica",
    response_model=None,
    responses=answers(200, SuspendedShape, errors=(404, 409, 502)),
)
async def suspend_session(request: Request, caller: Caller, session_id: str) -> Response:
    """Into a file of the replica, or its host memory. The next turn goes on as if it had not been."""
    gateway = gateway_of(request)
    told = await suspending.suspend(gateway.room, await session_of(gateway, caller, session_id))
    await gateway.store.note(line_of(request, caller, "session.suspend", session_id, replica=told["replica"]))
    return json_response(told)


@router.post(
    "/{session_id}/resume",
    summary="Bring a suspended session's KV to where its next turn takes it from",
    response_model=None,
    responses=answers(200, SuspendedShape, errors=(404, 409, 502)),
)
async def resume_session(request: Request, caller: Caller, session_id: str) -> Response:
    """Never necessary: it spares the next turn the wait."""
    gateway = gateway_of(request)
    told = await suspending.resume(gateway.room, await session_of(gateway, caller, session_id))
    await gateway.store.note(line_of(request, caller, "session.resume", session_id, replica=told["replica"]))
    return json_response(told)
