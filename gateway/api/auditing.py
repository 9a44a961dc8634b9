"""What a request tells the audit log: who asked, for what, and under which request id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import Request

from gateway.api.problems import request_id_of
from gateway.errors import Conflict
from gateway.store.audit_records import Action, AuditLine, Detail
from gateway.store.sessions import Store
from gateway.tenancy import Identity


def line_of(
    request: Request, caller: Identity, action: Action, object: str, *, tenant_id: str | None = None, **details: Detail
) -> AuditLine:
    """The line for what this caller does now. `tenant_id`: whose the object is, where it is not the caller's own;
    OPERATOR for what belongs to no tenant. `object` is an id that exists or was checked, never what came as it came."""
    whose = caller.tenant_id if tenant_id is None else tenant_id
    return AuditLine(action, object, whose, caller.key_id, request_id_of(request), details=details)


@asynccontextmanager
async def refusals_noted(store: Store, line: AuditLine) -> AsyncIterator[None]:
    """Writes the line with the error's code where what is inside is refused as a Conflict, which goes on its way."""
    try:
        yield
    except Conflict as error:
        await store.note(replace(line, outcome=error.code))
        raise
