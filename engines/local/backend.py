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
    pool_ok: bool = True  # the pool's books balanced when they were last checked
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
        """Of each kept session: session, tokens, blocks, last_used_s (seconds since its last use)."""
        ...

    async def forget(self, session: str, salt: str | None) -> int:
        """Drop what is kept under the name (None: under every salt) and say how many blocks that freed."""
        ...

    async def aclose(self) -> None: ...
