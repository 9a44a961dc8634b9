"""A replica as the gateway sees it: its engine, what it can do, how it is.

The view is refreshed in the background; a failed call marks it at once, a good probe brings it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engines.contract import Capabilities, Engine, EngineError, EngineLoad

FAILURES_TO_OPEN = 3  # refused answers in a row before a replica rests; a lost connection rests it at once
REST_S = 2.0  # how long it rests before a probe may bring it back


@dataclass(slots=True)
class Replica:
    """`capabilities` None: never reached so far."""

    engine: Engine
    url: str
    capabilities: Capabilities | None = None
    load: EngineLoad = field(default_factory=EngineLoad)
    healthy: bool = False
    last_error: str | None = None
    probed_at: float | None = None
    in_flight: int = 0
    failures: int = 0
    rest_until: float = 0.0
    draining: bool = False

    @property
    def name(self) -> str:
        return self.engine.name

    def serves(self, model: str) -> bool:
        return self.capabilities is not None and model in self.capabilities.models

    def available(self, now: float) -> bool:
        return self.healthy and not self.draining and now >= self.rest_until

    def failed(self, error: EngineError, now: float, *, lost: bool) -> None:
        """Note a failure of this replica itself (not of a request)."""
        self.failures += 1
        self.last_error = str(error)
        if lost or self.failures >= FAILURES_TO_OPEN:
            self.healthy = False
            self.rest_until = now + REST_S

    def answered(self) -> None:
        self.failures = 0


async def probe(replica: Replica, clock: Callable[[], float]) -> None:
    """Ask the replica what it can do and how busy it is; never raises EngineError."""
    try:
        replica.capabilities = await replica.engine.capabilities()
        replica.load = await replica.engine.load()
    except EngineError as error:
        replica.healthy = False
        replica.last_error = str(error)
    else:
        replica.healthy = True
        replica.last_error = None
        replica.failures = 0
    replica.probed_at = clock()
