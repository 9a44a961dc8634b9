"""Identifiers with a type prefix, sortable by time: `turn_01926b7c9a5f3f…`. Randomness and clock are parameters."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable


def id_maker(clock: Callable[[], float], random: Callable[[int], bytes] = secrets.token_bytes) -> Callable[[str], str]:
    """prefix -> prefix_ + 12 hex digits of milliseconds + 80 random bits in hex."""

    def new_id(prefix: str) -> str:
        return f"{prefix}_{int(clock() * 1000) & 0xFFFFFFFFFFFF:012x}{random(10).hex()}"

    return new_id


def derived_id(key: bytes, prefix: str, *parts: str) -> str:
    """An id that the same parts always get, and that nobody without the key can make."""
    message = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)
    digest = hmac.digest(key, message, hashlib.sha256)[:20]
    return f"{prefix}_{base64.b32encode(digest).decode().lower()}"
