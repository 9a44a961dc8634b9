"""Where a replica that runs elsewhere is to be found, as the operator writes it."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

UpstreamKind = Literal["auto", "turnkeep", "vllm", "openai"]


class UpstreamAddress(BaseModel):
    """A replica that runs elsewhere. Its URL comes only from here, never from a request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    api_key: SecretStr | None = None
    kind: UpstreamKind = "auto"  # auto: asked of the replica itself
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.:-]{0,64}$")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"an upstream is written http://HOST:PORT, not {url!r}")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("an upstream's URL holds no user, password, query or fragment; a key goes into api_key")
        return url.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", urlsplit(self.url).netloc)
        return self
