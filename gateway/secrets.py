"""The gateway's one secret, and the keys that derive from it. A derived key serves one purpose; it opens no other.

secret (setting, or the file data_dir/secret) -- derive(secret, "api key") --> key of the API keys' digests
                                              -- derive(secret, "cache salt") --> ...
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from gateway.settings import Settings

FILE = "secret"


class SecretUnusable(Exception):
    """The secret's file can be read by others, or not by us, or is damaged. Says what to do."""


def derive(secret: bytes, label: str, length: int = 32) -> bytes:
    """HKDF-SHA-256 (RFC 5869) with `label` as info: a key for one purpose. `length` in bytes, at most 8160."""
    pseudorandom_key = hmac.digest(b"turnkeep/1", secret, hashlib.sha256)
    output, block, counter = b"", b"", 0
    while len(output) < length:
        counter += 1
        block = hmac.digest(pseudorandom_key, block + label.encode() + bytes([counter]), hashlib.sha256)
        output += block
    return output[:length]


def load_secret(settings: Settings) -> bytes:
    """The setting `secret`, else the file in data_dir, which is made (mode 0600) where there is none.

    Raises SecretUnusable.
    """
    if settings.secret is not None:
        return settings.secret.get_secret_value().encode()
    path = settings.data_dir / FILE
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    _make_unless_there(path)
    return _read(path)


def _make_unless_there(path: Path) -> None:
    """Two gateways that start at once agree: the file appears whole, and only the first one's stays."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except FileExistsError:
        return  # the other gateway's secret is the one that holds
    finally:
        draft.unlink()


def _read(path: Path) -> bytes:
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except OSError as error:
        raise SecretUnusable(
            f"{path} cannot be read: {error.strerror}. Give it back to the user who runs it."
        ) from error
    if mode & 0o077:
        raise SecretUnusable(f"{path} can be read by others than its owner. Run: chmod 600 {path}")
    if len(text) < 32:
        raise SecretUnusable(
            f"{path} is damaged: it holds {len(text)} characters, a secret has 64. Restore it from a backup; "
            "if there is none, delete it and make new API keys (the old ones are then void)."
        )
    return text.encode()
