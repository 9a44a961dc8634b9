"""What the admin API takes and gives of keys, tenants and the audit log."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from gateway.errors import BadRequest

MOST_TTL_S = 315_360_000.0  # ten years
MOST_GRACE_S = 2_592_000.0  # thirty days
Scope = Literal["chat", "sessions", "read", "admin"]
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Label = Annotated[str, Field(min_length=1, max_length=128)]
Force = Annotated[bool, Field(description="Even where no admin key is left that works.")]

Limit = Annotated[int, Query(ge=1, le=100, description="Most entries of one page.")]
Cursor = Annotated[str | None, Query(max_length=1024, description="Where the page before ended: its `next_cursor`.")]


class KeyCreate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tenant: TenantName = "default"
    name: Label = Field("unnamed", description="What the key is for, to tell it from others.")
    scopes: list[Scope] = Field(["chat", "sessions"], min_length=1, max_length=4)
    ttl_seconds: float | None = Field(
        None, gt=0, le=MOST_TTL_S, allow_inf_nan=False, description="The key ends after this time. Default: never."
    )


class KeyRotate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    grace_s: float | None = Field(
        None,
        ge=0,
        le=MOST_GRACE_S,
        allow_inf_nan=False,
        description="The old key goes on working for so long; 0 ends it at once. Default: `key_grace_s`.",
    )
    force: Force = False


class KeyRevoke(BaseModel):
    model_config = ConfigDict(extra="forbid")
    force: Force = False


class TenantCreate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: TenantName
    name: Label | None = Field(None, description="What people call it. Default: its id.")


class KeyShape(BaseModel):
    """`state`: active; ending (another was made for it, and it works until `expires_at`); expired; revoked."""

    object: Literal["key"]
    id: str
    tenant: str
    name: str
    scopes: list[str]
    state: Literal["active", "ending", "expired", "revoked"]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    replaces: str | None
    replaced_by: str | None


class NewKeyShape(KeyShape):
    """`key`: the API key itself, this once."""

    key: str


class RotatedShape(NewKeyShape):
    """The new key; `old`: the one in whose place it is."""

    old: KeyShape


class KeyList(BaseModel):
    object: Literal["list"]
    data: list[KeyShape]
    has_more: bool
    next_cursor: str | None


class TenantShape(BaseModel):
    object: Literal["tenant"]
    id: str
    name: str
    created_at: float
    working_keys: int


class TenantList(BaseModel):
    object: Literal["list"]
    data: list[TenantShape]
    has_more: bool
    next_cursor: str | None


class AuditShape(BaseModel):
    """`target`: the id of what was acted on; `outcome`: done, or the code of the refusal."""

    object: Literal["audit.line"]
    id: str
    at: float
    tenant: str | None
    who: str
    action: str
    target: str
    request_id: str | None
    outcome: str
    details: dict[str, Any]


class AuditList(BaseModel):
    object: Literal["list"]
    data: list[AuditShape]
    has_more: bool
    next_cursor: str | None


def page_json(data: list[dict[str, Any]], next_cursor: str | None) -> dict[str, Any]:
    return {"object": "list", "data": data, "has_more": next_cursor is not None, "next_cursor": next_cursor}


def bad_cursor(error: ValueError) -> BadRequest:
    return BadRequest(f"cursor: {error}", code="invalid_cursor", param="cursor")
