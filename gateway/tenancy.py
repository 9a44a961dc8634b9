"""Whose a request is: API keys, tenants, and the names derived from them. Knows no HTTP, no database and no clock.

An API key is `tk-` and 256 random bits. The store keeps its digest, an HMAC under a derived key: a copy of the database
opens nothing. What a tenant's caches are salted with derives from the tenant, never from what a client sends.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from gateway.errors import Forbidden, Unauthorized
from gateway.limits.told import Told
from gateway.secrets import derive
from gateway.store.key_records import KeyRecord

DEFAULT_TENANT = "default"
SCOPES = frozenset({"chat", "sessions", "read", "admin"})
USER_SCOPES = frozenset({"chat", "sessions"})
KEY = re.compile(r"tk-[A-Za-z0-9_-]{43}")  # 256 bits in base64url
TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAMES_KEPT = 4_096  # sessions whose name towards replicas is remembered, about 300 bytes each
ID_LENGTH = 11  # "tk-" and 48 of the 256 bits: enough to tell keys apart, too few to guess the rest


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. `key_id` is the first characters of the key."""

    tenant_id: str
    key_id: str
    scopes: frozenset[str]
    told: Told = field(default_factory=Told, compare=False)  # how its limits stand, for the answer's headers

    def need(self, *scopes: str) -> None:
        """Raise Forbidden unless this identity has one of `scopes`; "admin" has them all."""
        if self.scopes.isdisjoint(scopes) and "admin" not in self.scopes:
            wanted = " and no scope ".join(repr(scope) for scope in scopes)
            raise Forbidden(f"this key has no scope {wanted}; it has: {', '.join(sorted(self.scopes)) or 'none'}")

    @property
    def only_reads(self) -> bool:
        """Whether it may look and change nothing, not even by leaving a stream."""
        return self.scopes == {"read"}


LOCAL = Identity(tenant_id=DEFAULT_TENANT, key_id="local", scopes=SCOPES)  # who asks while auth is off (loopback only)


def new_key(
    secret: bytes,
    *,
    tenant_id: str = DEFAULT_TENANT,
    name: str,
    scopes: frozenset[str] = USER_SCOPES,
    now: float,
    expires_at: float | None = None,
    random: Callable[[int], str] = secrets.token_urlsafe,
) -> tuple[str, KeyRecord]:
    """A fresh API key, to be shown once, and the record to store. `now` and `expires_at` in seconds since 1970.

    Raises ValueError for a tenant name or a scope that cannot be.
    """
    if why := tenant_refusal(tenant_id):
        raise ValueError(why)
    if unknown := scopes - SCOPES:
        raise ValueError(f"there is no scope {', '.join(sorted(unknown))}; there are {', '.join(sorted(SCOPES))}")
    key = "tk-" + random(32)
    record = KeyRecord(
        id=key[:ID_LENGTH],
        tenant_id=tenant_id,
        name=name,
        digest=key_digest(secret, key),
        scopes=scopes,
        created_at=now,
        expires_at=expires_at,
        revoked_at=None,
    )
    return key, record


def tenant_refusal(tenant_id: str) -> str | None:
    """Why no tenant can have that name; None: one can."""
    if TENANT.fullmatch(tenant_id):
        return None
    return f"a tenant's name is 1 to 64 of A-Z a-z 0-9 _ . - and not {tenant_id[:100]!r}"


def successor(secret: bytes, old: KeyRecord, *, now: float) -> tuple[str, KeyRecord]:
    """A fresh API key for the tenant, name, scopes and end of `old`, to be shown once, and the record to store."""
    key, record = new_key(
        secret, tenant_id=old.tenant_id, name=old.name, scopes=old.scopes, now=now, expires_at=old.expires_at
    )
    return key, replace(record, replaces=old.id)


def key_digest(secret: bytes, key: str) -> bytes:
    """What the store keeps of an API key: HMAC-SHA-256, 32 bytes."""
    return hmac.digest(derive(secret, "api key"), key.encode(), hashlib.sha256)


def key_of(authorization: str | None) -> str:
    """The API key in an Authorization header. Raises Unauthorized where there is none that could be one."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not KEY.fullmatch(key.strip()):
        raise Unauthorized("send your API key as `Authorization: Bearer tk-...`; `turnkeep keys create` makes one")
    return key.strip()


def identify(digest: bytes, record: KeyRecord | None, now: float) -> Identity:
    """Whose key has this digest, by the record the store found for it. Raises Unauthorized, with the same words for
    a key that is unknown, revoked or past its time."""
    known = hmac.compare_digest(digest, record.digest if record else bytes(32))
    if record is None or not known or not record.works(now):
        raise Unauthorized("this API key is unknown, revoked or past its time; `turnkeep keys create` makes a new one")
    return Identity(tenant_id=record.tenant_id, key_id=record.id, scopes=record.scopes)


def cache_salt(secret: bytes, tenant_id: str) -> str:
    """What the tenant's KV blocks are salted with, 43 characters of A-Z a-z 0-9 _ -. Equal salt is needed to share."""
    return _name(derive(secret, "cache salt"), tenant_id)


def affinity(secret: bytes, tenant_id: str, session_id: str) -> str:
    """A session's name towards replicas, 43 characters: opaque, and never that of another tenant's session."""
    return affinities(secret)(tenant_id, session_id)


def affinities(secret: bytes) -> Callable[[str, str], str]:
    """`affinity` for a gateway that asks for one every turn: the key is derived once, the latest names are kept."""
    key = derive(secret, "affinity")

    @lru_cache(NAMES_KEPT)
    def name(tenant_id: str, session_id: str) -> str:
        return _name(key, tenant_id, session_id)

    return name


def response_checks(secret: bytes) -> Callable[[str, str], str]:
    """(tenant, turn) -> 16 hex digits that end the id of the turn's response: another tenant's key makes others."""
    key = derive(secret, "response id")
    return lambda tenant_id, turn_id: _digest(key, tenant_id, turn_id)[:8].hex()


def subjects(secret: bytes) -> Callable[[str, str], str]:
    """(tenant, end user) -> 32 hex digits that a receipt names the user by: nobody reads the name out of it."""
    key = derive(secret, "erasure subject")
    return lambda tenant_id, user: _digest(key, tenant_id, user)[:16].hex()


def _name(key: bytes, *parts: str) -> str:
    return base64.urlsafe_b64encode(_digest(key, *parts)).rstrip(b"=").decode()


def _digest(key: bytes, *parts: str) -> bytes:
    message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
    return hmac.digest(key, message, hashlib.sha256)
