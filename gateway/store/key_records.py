"""API keys and tenants as they are stored, as plain values. Knows no SQL and no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# active: works · ending: works, and another was made for it · expired: its end has come · revoked: was ended
KeyState = Literal["active", "ending", "expired", "revoked"]


@dataclass(frozen=True, slots=True)
class KeyRecord:
    id: str  # shown to people: the key's first characters
    tenant_id: str
    name: str
    digest: bytes  # HMAC-SHA-256 of the secret; the secret itself is stored nowhere
    scopes: frozenset[str]  # "chat", "sessions", "admin", "read"
    created_at: float  # seconds since 1970
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None = None
    replaces: str | None = None  # the key that this one was made for, by rotation
    replaced_by: str | None = None

    def state(self, now: float) -> KeyState:
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        return "active" if self.replaced_by is None else "ending"

    def works(self, now: float) -> bool:
        return self.state(now) in ("active", "ending")


@dataclass(frozen=True, slots=True)
class KeyPage:
    keys: tuple[KeyRecord, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class TenantRecord:
    id: str
    name: str
    created_at: float  # seconds since 1970
    keys: int  # of it, that work


@dataclass(frozen=True, slots=True)
class TenantPage:
    tenants: tuple[TenantRecord, ...]
    next_cursor: str | None


class NoTenant(Exception):
    """A key was to be made for a tenant that there is not."""


class KeyOver(Exception):
    """The key cannot be rotated: it does not work any more, or another was made for it already."""

    def __init__(self, key: KeyRecord, state: KeyState) -> None:
        super().__init__(f"the key {key.id} is {state}")
        self.key = key
        self.state = state


class LastAdminKey(Exception):
    """Without this key none would work that may do everything."""
