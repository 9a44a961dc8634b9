"""Every setting of the gateway, with its default and its meaning. Reads nothing: `gateway.configure` reads the sources.

`Settings(port=8081)` has exactly the values named and the defaults, whatever the environment holds.
docs/settings.md is the same list for people; a test compares the two.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.policy import CompactionFields
from gateway.prices import Price
from gateway.store.records import LONGEST_LEASE_S
from gateway.upstream import UpstreamAddress

DEMO_MODEL = "smollm2-135m-instruct"
MIB = 1024 * 1024
MASK = "********"
REDIS = ("redis://", "rediss://", "redis+unix://")

HistoryMode = Literal["auto", "off", "match", "append", "replace"]
OnDisconnect = Literal["cancel", "finish"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Explained:
    """One setting as it stands. `value` is text, secrets masked; `source` says who set it."""

    name: str
    value: str
    source: str
    description: str


class Settings(BaseSettings):
    """Frozen; wrong values raise pydantic's ValidationError here, and a readable `SettingsError` in `load_settings`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True)

    # where it listens and what it keeps
    host: str = Field("127.0.0.1", description="Address to listen on. Any other than loopback needs `auth` on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    data_dir: Path = Field(Path(".turnkeep"), description="Folder for the SQLite database and the secret.")
    database_url: str = Field(
        repr=False,  # may hold a password
        default_factory=lambda seen: f"sqlite:///{Path(seen.get('data_dir', '.turnkeep')).absolute()}/turnkeep.db",
        description="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME. Default: turnkeep.db in `data_dir`.",
    )
    without_database: Literal["refuse", "unsaved"] = Field(
        "refuse",
        description="What becomes of chats while the database does not answer. refuse: 503. unsaved: those that need "
        "nothing from it are answered, marked, and not kept; sessions are refused either way.",
    )
    keys_without_database_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="With unsaved, an API key that the database knew so long ago is believed for chats while it does "
        "not answer; that a key was revoked is not seen meanwhile. 0: none is.",
    )
    sqlite_synchronous: Literal["FULL", "NORMAL"] = Field(
        "FULL", description="NORMAL is faster; a power loss may then take the last commits."
    )
    gateway_name: str = Field(
        default_factory=lambda seen: f"{socket.gethostname()[:48]}-{seen.get('port') or secrets.token_hex(6)}",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="Names this gateway's leases: different for each gateway on one database, the same after a "
        "restart. Default: HOSTNAME-PORT; with port 0 a new one at each start.",
    )

    # engines
    upstreams: Annotated[tuple[UpstreamAddress, ...], NoDecode] = Field(
        (),
        description="Replicas that run elsewhere (url, and if needed api_key, kind, name, fallback). With one named "
        "that is no fallback, no embedded engine is started and torch is never imported. As a variable: URLs separated "
        "by commas, or JSON.",
    )
    model: str = Field(DEMO_MODEL, min_length=1, description="Model of the embedded engine: a name or a folder.")
    model_dir: Path | None = Field(
        None, description="Folder that holds the weights of `model`. Default: found by name among the fetched models."
    )
    tokenizers: Annotated[dict[str, Path], NoDecode] = Field(
        {},
        description="Folder with tokenizer.json and tokenizer_config.json for each upstream model, so that it is "
        "served by token ids. As a variable: MODEL=FOLDER separated by commas, or JSON.",
    )
    engine_threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of the engine. Default: all cores."
    )
    engine_pool_bytes: int | None = Field(
        None, ge=MIB, description="Memory of the KV pool, in bytes. Default: a share of the free memory."
    )
    engine_host_bytes: int | None = Field(
        None,
        ge=0,
        description="Host memory for blocks that the KV pool gives up, in bytes. Default: none on a CPU, whose pool is "
        "host memory already; beside a GPU a quarter of what is free, 16 GiB at most.",
    )
    engine_kv_dir: Path | None = Field(
        None,
        description="Folder of the engine for blocks that host memory gives up, and for suspended sessions.",
    )
    engine_disk_bytes: int | None = Field(
        None, ge=1, description="Most bytes in `engine_kv_dir`. Default: half of the free space, 16 GiB at most."
    )
    engine_block_size: Literal[16, 32, 64] = Field(32, description="Tokens in a KV block.")
    engine_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and KV; auto: float32 on a CPU, the model's own on a GPU."
    )
    engine_device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where torch sees one.")
    engine_max_batch_tokens: int = Field(
        512, ge=16, le=1 << 20, description="Most tokens of one step of the engine: a longer prefill is cut in chunks."
    )

    engine_eviction: Literal["cost_aware", "lru", "lfu", "adaptive_ttl"] = Field(
        "cost_aware", description="Which cached blocks the engine gives up first."
    )
    engine_max_sessions: int = Field(
        1000, ge=1, le=1 << 20, description="Most session caches of the engine; evicting one deletes no session."
    )
    engine_kv_precision: Literal["full", "auto", "seed", "int8", "k8v4", "int4"] = Field(
        "full", description="Which cached blocks of the engine go to 8 and 4 bits (kv-quantization.md)."
    )
    engine_kv_int8_at: float | None = Field(
        None,
        gt=0,
        le=1e7,
        allow_inf_nan=False,
        description="With auto and seed: from which length on a session's older blocks go to 8 bits; up to 1 a share "
        "of the window, above it tokens. Default: 0.25; seed: 8192.",
    )
    engine_kv_int4_at: float | None = Field(
        None,
        gt=0,
        le=1e7,
        allow_inf_nan=False,
        description="The same for 4 bits. Default: 0.5; seed: 16384.",
    )

    # sessions and turns
    lease_s: Seconds = Field(
        5.0, le=LONGEST_LEASE_S, description="A session whose gateway died is free again after this long; 120 at most."
    )
    lease_renew_s: Seconds = Field(1.5, description="A running turn renews its lease this often; under half `lease_s`.")
    heartbeat_s: Seconds = Field(15.0, description="A quiet stream carries a comment this often.")
    idempotency_ttl_s: Seconds = Field(86_400.0, description="How long an Idempotency-Key is remembered.")
    stream_retention_s: Seconds = Field(900.0, description="How long a finished stream can still be resumed.")
    session_ttl_s: Seconds | None = Field(
        None,
        description="A session that nobody used for so long is erased; each turn begins the time anew. Not one that is "
        "archived, or has a `ttl_seconds` of its own. Default: kept until somebody erases it.",
    )
    tenant_session_ttl_s: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {}, description="The same for one tenant: seconds for each name, 0 for ever. As a variable: JSON."
    )
    replica_gone_s: Seconds = Field(
        604_800.0,
        description="An erasure waits so long for a replica that no gateway has seen; then it is taken for gone.",
    )
    history_mode: HistoryMode = Field(
        "auto",
        description="What /v1/chat/completions does with history where the request does not say. auto: match without a "
        "session key; with one, append for new messages and replace for a whole history.",
    )
    chat_on_disconnect: OnDisconnect = Field(
        "cancel", description="What becomes of a stateless chat whose client left: cancel stops the engine."
    )
    session_on_disconnect: OnDisconnect = Field(
        "finish", description="What becomes of a session's turn whose client left: finish goes on, to be resumed."
    )
    max_output_tokens: int = Field(
        1024, ge=1, description="Longest answer where the request names no limit, in tokens."
    )
    compaction: CompactionFields = Field(
        default_factory=lambda: CompactionFields.model_validate({}),
        description="What is done with old turns when the window fills, where a session does not say: a table of "
        "docs/compaction.md's fields. As a variable: JSON.",
    )
    tenant_compaction: dict[str, CompactionFields] = Field(
        {}, description="The same for one tenant: a table for each name. As a variable: JSON."
    )
    compactions_at_once: int = Field(
        2, ge=1, le=64, description="Compactions in the background, of all sessions together."
    )
    summary_timeout_s: Seconds = Field(
        300.0,
        description="A model gets this long for a summary; then it is extracted without one. And for a new prefix.",
    )

    # limits
    max_body_bytes: int = Field(2 * MIB, ge=1024, description="Largest request body, in bytes.")
    max_image_body_bytes: int = Field(20 * MIB, ge=1024, description="The same where images may come, in bytes.")
    body_timeout_s: Seconds = Field(30.0, description="A request, its headers or body, that pauses longer is given up.")
    max_in_flight: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Turns that this gateway has at one replica at once; more wait here. Default: what the engine says "
        "of itself, else 64.",
    )
    queue_max_waiting: int = Field(
        1024, ge=0, le=1_000_000, description="Turns that may wait for one replica; beyond it 429 with Retry-After."
    )
    queue_timeout_s: Seconds = Field(60.0, description="A turn that waits longer for its replica is refused with 503.")
    drain_timeout_s: Seconds = Field(
        600.0, description="A drain that names no time moves sessions for so long; then the rest begins anew elsewhere."
    )
    pin_ttl_s: Seconds = Field(
        86_400.0, description="A session idle for longer is placed anew: its KV cache is long gone where it ran last."
    )
    added_replicas_max: int = Field(
        256, ge=0, le=10_000, description="Replicas that may be added at runtime, of all gateways on one database."
    )
    link_local_replicas: bool = Field(
        False, description="Replicas added at runtime may have link-local and cloud metadata addresses."
    )
    connect_timeout_s: Seconds = Field(5.0, description="Connecting to a replica.")
    first_delta_timeout_s: Seconds = Field(300.0, description="From the request to a replica's first token.")
    idle_timeout_s: Seconds = Field(60.0, description="Between two tokens of a replica.")
    total_timeout_s: Seconds = Field(1800.0, description="One whole answer.")
    grace_s: float = Field(
        30.0, ge=0, allow_inf_nan=False, description="On SIGTERM, running turns get this long to finish."
    )
    handover_s: float = Field(
        5.0,
        ge=0,
        le=20,
        allow_inf_nan=False,
        description="After the grace, the turns that still run are offered to other gateways on the same database, "
        "until none is taken for this long; those that are left are cut short. 0: nothing is offered.",
    )

    limits_storage: str = Field(
        "auto",
        repr=False,  # may hold a password
        description="Where limits of tenants and keys are counted: `memory` of this gateway, `database`, or a Redis "
        "(redis://USER:PASSWORD@HOST:PORT/N, rediss://, redis+unix://). auto: the database where that is PostgreSQL, "
        "which gateways share; else memory.",
    )
    limits_failure: Literal["allow", "refuse"] = Field(
        "allow", description="What becomes of requests that a limit holds for while it cannot be counted."
    )

    # what was used
    prices: dict[str, Price] = Field(
        {},
        description="What a million tokens of a model cost: a table for each model with `prompt`, `output` and perhaps "
        "`cached`. As a variable: JSON.",
    )
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="Of `prices`, as three letters (ISO 4217).")
    usage_names_s: Seconds = Field(
        7_776_000.0,
        description="The usage ledger tells sessions and end users apart for so long (90 days); then days, keys and "
        "models alone.",
    )

    # who may ask
    auth: bool = Field(True, description="Every call needs an API key. Off only on a loopback address.")
    secret: SecretStr | None = Field(
        None,
        description="At least 32 characters; keys, cache salts and cursors derive from it. Gateways on one database "
        "need the same. Default: the file `secret` in `data_dir`, made at the first start (mode 0600).",
    )
    key_grace_s: float = Field(
        21_600.0,
        ge=0,
        le=2_592_000,
        allow_inf_nan=False,
        description="After a rotation that names no time, the old API key goes on working for so long.",
    )
    audit_retention_s: Seconds = Field(
        31_536_000.0, description="How long a line of the audit log is kept; the default is a year."
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Origins whose pages may call the API from a browser. As a variable: separated by commas."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity that is logged."
    )

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is passed: `gateway.configure.load_settings` reads the other sources."""
        return (init_settings,)

    def said_by(self, sources: Mapping[str, str]) -> Self:
        """These settings, with who set each: `turnkeep.toml:3`, `TURNKEEP_PORT`, `--port`; the rest are defaults."""
        self._sources.update(sources)
        return self

    def explain(self) -> tuple[Explained, ...]:
        """Every setting with its value and its source, in the order of docs/settings.md."""
        return tuple(
            Explained(
                name, _shown(name, getattr(self, name)), self._sources.get(name, "default"), field.description or ""
            )
            for name, field in type(self).model_fields.items()
        )

    @property
    def counted_in(self) -> str:
        """`limits_storage`, with auto made out."""
        if self.limits_storage != "auto":
            return self.limits_storage
        return "memory" if self.database_url.startswith("sqlite") else "database"

    @property
    def embedded(self) -> bool:
        """Whether the gateway starts an engine of its own: where no replica is named, or only fallbacks are."""
        return all(upstream.fallback for upstream in self.upstreams)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: Any) -> Any:
        field = cls.model_fields[info.field_name]
        if isinstance(value, bool) and field.annotation is not bool:
            raise ValueError("true and false are no value here")
        return value

    @field_validator("upstreams", mode="before")
    @classmethod
    def _upstreams_from_text(cls, value: Any) -> Any:
        listed = _listed(value)
        return [{"url": item} if isinstance(item, str) else item for item in listed] if _is_list(listed) else listed

    @field_validator("engine_block_size", mode="before")
    @classmethod
    def _number_from_text(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("compaction", "tenant_compaction", "prices", "tenant_session_ttl_s", mode="before")
    @classmethod
    def _table_from_text(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _origins_from_text(cls, value: Any) -> Any:
        return _listed(value)

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            parts = urlsplit(origin)
            if (
                parts.scheme not in ("http", "https")
                or f"{parts.scheme}://{parts.netloc}" != origin
                or not parts.hostname
            ):
                raise ValueError(
                    f"{origin[:200]!r} is no origin: SCHEME://HOST or SCHEME://HOST:PORT, each named, no path"
                )
        return origins

    @field_validator("tokenizers", mode="before")
    @classmethod
    def _tokenizers_from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("{"):
            return json.loads(value)
        pairs = [item.partition("=") for item in _listed(value)]
        if any(not (model and folder) for model, _, folder in pairs):
            raise ValueError("written MODEL=FOLDER, separated by commas")
        return {model: folder for model, _, folder in pairs}

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, url: str) -> str:
        scheme = url.partition(":")[0].partition("+")[0]
        if scheme not in ("sqlite", "postgresql", "postgres"):
            raise ValueError("written sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME")
        return url

    @field_validator("limits_storage")
    @classmethod
    def _known_storage(cls, where: str) -> str:
        if where not in ("auto", "memory", "database") and not where.startswith(REDIS):
            raise ValueError(f"auto, memory, database, or a URL that begins with {', '.join(REDIS)}")
        return where

    @field_validator("secret")
    @classmethod
    def _long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret.get_secret_value()) < 32:
            raise ValueError("too short: at least 32 characters (openssl rand -hex 32 makes one)")
        return secret

    @field_validator("upstreams")
    @classmethod
    def _different_names(cls, upstreams: tuple[UpstreamAddress, ...]) -> tuple[UpstreamAddress, ...]:
        names = [upstream.name for upstream in upstreams]
        if len(set(names)) < len(names):
            raise ValueError(f"two upstreams have one name: {', '.join(sorted(names))}")
        return upstreams

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if not self.auth and not is_loopback(self.host):
            raise ValueError(
                f"auth is off and host is {self.host}, which others can reach: turn auth on, or listen on 127.0.0.1"
            )
        if self.lease_renew_s > self.lease_s / 2:
            raise ValueError(f"lease_renew_s {self.lease_renew_s} must be at most half of lease_s {self.lease_s}")
        return self


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def choices(field: str) -> tuple[Any, ...]:
    """What a setting with a fixed list of values may be."""
    return get_args(Settings.model_fields[field].annotation)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _listed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return json.loads(value)
    return [item.strip() for item in value.split(",") if item.strip()]


def _shown(name: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        return MASK
    if name in ("database_url", "limits_storage"):
        return masked_url(value)
    if name == "upstreams":
        return ", ".join(f"{u.name}={u.url} ({u.kind}{', key ' + MASK if u.api_key else ''})" for u in value)
    if isinstance(value, CompactionFields):
        return ", ".join(f"{key}={item}" for key, item in value.named().items())
    if name == "prices":
        return "; ".join(f"{model}: {price.model_dump_json(exclude_none=True)}" for model, price in value.items())
    if name == "tenant_compaction":
        return "; ".join(f"{tenant}: {_shown('', fields)}" for tenant, fields in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return ", ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


def masked_url(url: str) -> str:
    """The URL without its password."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", f":{MASK}@") if password else url
