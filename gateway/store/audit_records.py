"""Lines of the audit log, as plain values: who did what to which object, and what came of it. Knows no SQL.

A line holds ids and numbers: never a message, a name that somebody chose freely, or a secret. What would point at a
person (an end user's reference) is digested before it comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Action = Literal[
    "key.create",
    "key.rotate",
    "key.revoke",
    "tenant.create",
    "limits.set",
    "limits.remove",
    "replica.add",
    "replica.drain",
    "replica.undrain",
    "replica.remove",
    "session.archive",
    "session.unarchive",
    "session.delete",
    "session.expire",
    "session.import",
    "session.suspend",
    "session.resume",
    "response.delete",
    "user.erase",
]
Detail = str | int | float | bool | None

OPERATOR = ""  # the tenant of what belongs to none
CLI = "cli"  # who: a command on the gateway's own database
SWEEP = "sweep"  # who: the gateway itself, when a time is over
DONE = "done"


@dataclass(frozen=True, slots=True)
class AuditLine:
    """`who`: the id of an API key, "local" (auth is off), CLI or SWEEP. `tenant_id`: whose the object is, or OPERATOR.

    `outcome`: DONE, or the code of the error that it was refused with.
    """

    action: Action
    object: str
    tenant_id: str
    who: str
    request_id: str | None = None
    outcome: str = DONE
    details: Mapping[str, Detail] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditRecord:
    id: str
    at: float  # seconds since 1970
    line: AuditLine


@dataclass(frozen=True, slots=True)
class AuditFilter:
    tenant_id: str | None = None  # OPERATOR: lines of no tenant
    action: str | None = None
    since: float | None = None  # seconds since 1970; from then on
    until: float | None = None  # before that


@dataclass(frozen=True, slots=True)
class AuditPage:
    records: tuple[AuditRecord, ...]
    next_cursor: str | None


def by_command(action: Action, object: str, tenant_id: str, **details: Detail) -> AuditLine:
    """A command on the database itself: there is no key and no request."""
    return AuditLine(action, object, tenant_id, CLI, details=details)


def expired(tenant_id: str, session_id: str) -> AuditLine:
    """A session whose time was over."""
    return AuditLine("session.expire", session_id, tenant_id, SWEEP)
