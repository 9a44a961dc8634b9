"""Limits of a tenant and of its keys, as plain values. Knows no SQL and no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

TENANT = ""  # Limited.key_id of the tenant's own limits, which all of its keys share
MOST = 1 << 53  # of any limit: JSON, Lua and doubles hold it exactly


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit. 0 lets nothing through."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_turns: int | None = None
    sessions: int | None = None
    stored_bytes: int | None = None
    month_tokens: int | None = None
    kv_bytes: int | None = None

    def named(self) -> Iterator[tuple[str, int]]:
        """Those that are set."""
        for name in LIMITS:
            if (value := getattr(self, name)) is not None:
                yield name, value


LIMITS = tuple(field.name for field in fields(Limits))
NONE = Limits()


@dataclass(frozen=True, slots=True)
class Limited:
    """Whose limits these are: a tenant's (`key_id` TENANT), or one key's within it."""

    tenant_id: str
    key_id: str
    limits: Limits
    updated_at: float | None  # seconds since 1970; None: not stored

    def as_json(self) -> dict[str, Any]:
        return {
            "object": "limits",
            "tenant": self.tenant_id,
            "key": self.key_id or None,
            "limits": asdict(self.limits),
            "updated_at": self.updated_at,
        }


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom something counts for: a tenant, or a key of it."""

    tenant_id: str
    key_id: str = TENANT

    def __str__(self) -> str:
        return f"{self.tenant_id}/{self.key_id}"


@dataclass(frozen=True, slots=True)
class Bound:
    """How many sessions may be stored, for the holder of a new one."""

    holder: Holder
    most: int


class TooManySessions(Exception):
    """A session is refused: its holder has as many as it may."""

    def __init__(self, bound: Bound, stored: int) -> None:
        super().__init__(f"{bound.holder} has {stored} sessions, of at most {bound.most}")
        self.bound = bound
        self.stored = stored
