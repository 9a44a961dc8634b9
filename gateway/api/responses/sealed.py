"""What a client carries for us and cannot read or change: `encrypted_content` of reasoning and of compaction items.

AES-256-GCM under a key that derives from the gateways' secret, bound to the tenant and to what it is: another tenant's
opens no more than one that was made elsewhere. Stored nowhere.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from typing import Any

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gateway.sealing import NONCE_BYTES, CannotOpen
from gateway.secrets import derive

VERSION = "tk1."


@dataclass(frozen=True, slots=True)
class ContentSeal:
    key: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> ContentSeal:
        return cls(derive(secret, "item content"))

    def seal(self, tenant_id: str, kind: str, value: Any) -> str:
        nonce = os.urandom(NONCE_BYTES)
        sealed = AESGCM(self.key).encrypt(nonce, orjson.dumps(value), _bound(tenant_id, kind))
        return VERSION + base64.urlsafe_b64encode(nonce + sealed).decode()

    def unseal(self, tenant_id: str, kind: str, text: str) -> Any:
        """Raises CannotOpen."""
        try:
            if not text.startswith(VERSION):
                raise ValueError("not one of ours")
            raw = base64.b64decode(text[len(VERSION) :].encode("ascii"), altchars=b"-_", validate=True)
            whole = AESGCM(self.key).decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], _bound(tenant_id, kind))
            return orjson.loads(whole)
        except (InvalidTag, ValueError, binascii.Error) as error:
            raise CannotOpen("it was not made here, or for somebody else") from error


def _bound(tenant_id: str, kind: str) -> bytes:
    return f"{kind}\0{tenant_id}".encode()
