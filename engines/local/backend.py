"""What stands behind the HTTP front: the seam between `server` and whatever generates. Knows no HTTP and no torch.

server --> Backend --> ModelProcess    the model in a process of its own (model_process.py)
                   `-> InProcess       an engines.contract.Engine in this process, EchoEngine say (in_process.py)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from engines.contract import Capabilities
from engines.local.wire import Event, WireRequest

State = Literal["loading", "ok", "dead"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. `window` in tokens; ids are below `vocab`; `folder` holds the tokenizer's files."""

    name: str
    folder: Path
    window: int
    vocab: int
    block_size: int
    device: str
    dtype: str
    epoch: str  # another after every start: what was cached before is gone
    eviction: str | None = None  # policy of its cached blocks; None: it keeps none
    kv_refused: dict[str, str] = field(default_factory=dict)  # KV codecs that the model does not bear, and why
    no_native: str | None = "it has no weights"  # why the compiled decoder does not run; None: it does
    attention: dict[str, Any] = field(default_factory=dict)  # path, why, ran_on: how, and where that was proven
    no_shift: str | None = "it keeps no K/V"  # why it takes no KV shift; None: it takes one


@dataclass(frozen=True, slots=True)
class Status:
    """How busy and how full, as last heard: asking never waits for the model. Blocks: free + cached + used = total."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_used: int = 0
    pool_bytes: int = 0
    sealed_bytes: int = 0  # of `pool_bytes`
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)  # below the pool: bytes, capacity, blocks by tier
    sealed: dict[str, int] = field(default_factory=dict)  # units of 64 tokens by codec
    pool_ok: bool = True  # the pool's books balanced when they were last checked
    gauges: dict[str, float] = field(default_factory=dict)  # of the engine core, now
    counters: dict[str, float] = field(default_factory=dict)  # of the engine core, since its start


class Backend(Protocol):
    """Every method raises Refusal or EngineError and nothing else."""

    @property
    def state(self) -> State: ...

    @property
    def info(self) -> ModelInfo:
        """Only when `state` is not "loading"."""
        ...

    def generate(self, request: WireRequest) -> AsyncGenerator[list[Event], None]:
        """First yields [] when the request is taken (before that it may be refused), then events as they come, the
        last of kind last or error. Closing the generator cancels the request.
        """
        ...

    async def status(self) -> Status: ...

    async def capabilities(self) -> Capabilities: ...

    async def sessions(self) -> list[dict[str, Any]]:
        """Of each kept session: session, tokens, blocks, bytes (at full precision), last_used_s (since then)."""
        ...

    async def forget(self, session: str, salt: str | None) -> dict[str, int]:
        """Drop what is kept under the name (None: under the salts that a path is kept of) -> blocks that went, by tier.
        A Refusal (storage_failed): some of it may still be there."""
        ...

    async def suspend(self, session: str, salt: str, to: str | None) -> dict[str, Any]:
        """Put its K/V down -> session, salt, tokens, blocks, bytes, tier. `to`: host, disk or remote; None: a file, or
        host memory where there is no disk tier."""
        ...

    async def resume(self, session: str, salt: str) -> dict[str, Any]:
        """Bring it to where its next turn takes it from -> tokens, and its blocks by tier: device, host, disk."""
        ...

    async def save(self, session: str, salt: str) -> dict[str, Any]:
        """Write its K/V to a file, as `suspend` and with its `path`; it stays where it is."""
        ...

    async def adopt(self, path: Path, session: str, salt: str) -> dict[str, Any]:
        """Take over a file of that session which another replica saved; where that cannot be, it is removed."""
        ...

    async def aclose(self) -> None: ...
