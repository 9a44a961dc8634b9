"""Where a replica that runs elsewhere is to be found, as the operator writes it."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from engines.remote.kv_feed import FeedAddress

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
MAX_URL = 2048  # characters
_PRINTED = re.compile(r"[!-\[\]-~]+").fullmatch
_NAMES = re.compile(
    r"[A-Za-z0-9_:\[-][A-Za-z0-9_.:\[\]-]{0,63}"
).fullmatch  # of a host and a port, as a replica is named after them
UpstreamKind = Literal["auto", "turnkeep", "vllm", "sglang", "llamacpp", "openai"]


class UpstreamAddress(BaseModel):
    """A replica that runs elsewhere. Its URL comes from the settings or an admin's call, from no other request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    api_key: SecretStr | None = None
    kind: UpstreamKind = "auto"  # auto: asked of the replica itself
    name: str = Field(default="", pattern=r"^([A-Za-z0-9_:-][A-Za-z0-9_.:-]{0,63})?$")
    revision: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_.:/@+-]{1,128}$", description="Names the model's weights, where its engine cannot."
    )
    fallback: bool = False  # takes a turn, by chat, only where no other replica can
    models: dict[str, str] = Field({}, description="Of a fallback: names of models here, and what to ask for there.")
    # None: the setting of the same name
    max_in_flight: int | None = Field(None, ge=1, le=100_000)
    queue_max_waiting: int | None = Field(None, ge=0, le=1_000_000)
    queue_timeout_s: Seconds | None = None
    connect_timeout_s: Seconds | None = None
    first_delta_timeout_s: Seconds | None = None
    idle_timeout_s: Seconds | None = None
    total_timeout_s: Seconds | None = None
    # where vLLM or SGLang publishes its KV events; our own engine says it itself
    kv_events: str | None = None  # tcp://HOST:PORT or ipc://PATH
    kv_replay: str | None = None
    kv_topic: str = ""
    kv_ranks: int = 1  # data-parallel ranks: the next ones publish at the ports that follow

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if len(url) > MAX_URL or not _PRINTED(
            url
        ):  # what parsers of URLs read in two ways, too: blanks, line ends, backslashes
            raise ValueError(f"an upstream's URL is up to {MAX_URL} characters of ASCII without blanks and backslashes")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # no port raises ValueError
            raise ValueError(f"an upstream is written http://HOST:PORT, not {url[:200]!r}")
        if "@" in parts.netloc or "?" in url or "#" in url:
            raise ValueError("an upstream's URL holds no user, password, query or fragment; a key goes into api_key")
        return f"{parts.scheme}://{parts.netloc.lower()}{parts.path}".rstrip("/").removesuffix("/v1")

    def feed_address(self) -> FeedAddress | None:
        """Where its KV events are; None: nobody said."""
        if self.kv_events is None:
            return None
        return FeedAddress(self.kv_events, self.kv_replay, topic=self.kv_topic, ranks=self.kv_ranks)

    def kv_elsewhere(self) -> str | None:
        """Which of its KV endpoints is not on the host of its URL, if one is not."""
        host = urlsplit(self.url).hostname
        told = (endpoint for endpoint in (self.kv_events, self.kv_replay) if endpoint is not None)
        return next((endpoint for endpoint in told if urlsplit(endpoint).hostname != host), None)

    @model_validator(mode="after")
    def _publishes(self) -> Self:
        if self.kv_events is None and (self.kv_replay is not None or self.kv_topic or self.kv_ranks != 1):
            raise ValueError("kv_replay, kv_topic and kv_ranks say more about kv_events, which is not given")
        self.feed_address()
        return self

    @model_validator(mode="after")
    def _models_of_a_fallback(self) -> Self:
        if self.models and not self.fallback:
            raise ValueError("models names what a fallback is asked for instead: set fallback = true with it")
        return self

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not self.name:
            name = urlsplit(self.url).netloc
            if not _NAMES(name):
                raise ValueError(f"give it a name: {name[:100]!r} is none")
            object.__setattr__(self, "name", name)
        return self
