"""Keys of other servers, sealed for the database: AES-256-GCM under a key that derives from the gateways' secret.

A copy of the database opens none of them. Each is bound to what it is for: a row that was given another URL opens no
more, so nobody who can write to the database can have a key sent to a server of his own.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.secrets import derive

NONCE_BYTES = 12


class CannotOpen(Exception):
    """Sealed under another secret, for something else, or damaged."""


def seal(secret: bytes, text: str, purpose: str) -> bytes:
    """nonce, then ciphertext and tag. `purpose` is needed again to open it."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(derive(secret, "replica credential")).encrypt(nonce, text.encode(), purpose.encode())


def unseal(secret: bytes, sealed: bytes, purpose: str) -> str:
    """Raises CannotOpen."""
    nonce, rest = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
    try:
        return AESGCM(derive(secret, "replica credential")).decrypt(nonce, rest, purpose.encode()).decode()
    except (InvalidTag, ValueError) as error:
        raise CannotOpen("the replica's API key was stored under another secret than this gateway has") from error
