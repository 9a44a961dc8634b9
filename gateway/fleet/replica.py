"""A replica as the gateway sees it: its engine, what it can do, how it is, who waits for it.

    connecting --good probe--> ready --connection lost, or 3 failures in a row--> resting
    ready, resting, trial --failed probe--> down --good probe--> ready
    resting --good probe after the rest--> trial: one turn at a time --answered--> ready
                                                                    `-failed--> resting, twice as long, 4 s at most

A failure of traffic is only outlived by traffic: an engine that answers probes and fails turns stays away, but for one
turn at a time. One that was down, or came back in another life, is ready with its first good probe. Knows no clock.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from engines.contract import Capabilities, Engine, EngineError, EngineLoad, EngineOverloaded, EngineUnreachable
from gateway.fleet.queue import DEFAULT_LIMIT, ReplicaQueue, Withdrawn

log = structlog.get_logger(__name__)

FAILURES_TO_OPEN = 3  # failed turns in a row before a replica rests; a lost connection rests it at once
LATE_TO_OPEN = 2  # probes in a row without an answer in time: one alone may be a busy moment
REST_S = 2.0  # how long it rests before a probe may bring it back; doubled while trials fail
MOST_REST_S = 4.0  # with a probe a second, it is back within 5 s after it answers
HEARD_S = 5.0  # a replica that sent a piece of an answer within this is not taken to hang
HISTORY = 100  # changes that are remembered

State = Literal["connecting", "ready", "resting", "trial", "down", "draining", "drained"]
LOST: tuple[State, ...] = ("resting", "down")
Source = Literal["settings", "api"]


class Silent(EngineUnreachable):
    """The replica hangs: it answers no probe, and has sent nothing of an answer for longer than a probe waits."""


@dataclass(frozen=True, slots=True)
class Change:
    """`at`: the fleet's clock, seconds."""

    at: float
    state: State
    reason: str


@dataclass(slots=True)
class Replica:
    """`capabilities` None: never reached so far. Moments are of the fleet's clock, seconds."""

    engine: Engine
    url: str
    capabilities: Capabilities | None = None
    load: EngineLoad = field(default_factory=EngineLoad)
    healthy: bool = False
    last_error: str | None = None
    probed_at: float | None = None
    in_flight: int = 0  # of this gateway: turns and background work that run there
    failures: int = 0
    rest_until: float = 0.0
    draining: bool = False  # it takes no more turns
    drained: bool = False  # and nothing is left to do for it
    half_open: bool = False  # one turn at a time, until one was answered
    trials: int = 0
    rest_s: float = REST_S
    was_down: bool = False  # a probe failed since it was well
    late: int = 0  # probes in a row without an answer in time
    heard_at: float = -math.inf  # when a turn's last piece came from there
    inside: dict[asyncio.Task[Any], bool] = field(default_factory=dict)  # who has a place there; True: abandoned
    source: Source = "settings"
    revision: str | None = None  # names the weights of what it serves: the operator's word, before the engine's own
    fallback: bool = False  # takes a turn only where no other replica can
    max_in_flight: int | None = None  # as somebody set it; None: the engine's own word, else DEFAULT_LIMIT
    queue: ReplicaQueue = field(default_factory=lambda: ReplicaQueue(clock=time.monotonic))
    history: deque[Change] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def __post_init__(self) -> None:
        self.queue.name = self.queue.name or self.engine.name

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def queued(self) -> int:
        """Turns that wait for it in this gateway."""
        return self.queue.waiting

    @property
    def queued_tokens(self) -> float:
        """What those turns have to be computed, and may generate."""
        return self.queue.waiting_cost

    @property
    def state(self) -> State:
        if self.draining:
            return "drained" if self.drained else "draining"
        if self.healthy:
            return "trial" if self.half_open else "ready"
        if self.capabilities is None:
            return "connecting"
        return "down" if self.was_down else "resting"

    def serves(self, model: str) -> bool:
        return self.capabilities is not None and model in self.capabilities.models

    def fingerprint(self, model: str) -> str | None:
        """Names the weights behind the model's name there; None: neither the operator nor the engine says."""
        return self.revision or (self.capabilities.fingerprints.get(model) if self.capabilities is not None else None)

    def marks(self) -> dict[str, object]:
        """What an answer says of the replica beside its name."""
        kind = self.capabilities.kind if self.capabilities is not None else None
        return {"kind": kind, **({"fallback": True} if self.fallback else {})}

    def available(self, now: float) -> bool:
        return self.healthy and not self.draining and now >= self.rest_until and not (self.half_open and self.trials)

    @asynccontextmanager
    async def taken(
        self, tenant: str, *, cost: float = 1.0, background: bool = False, going_on: bool = False
    ) -> AsyncIterator[float]:
        """A place at this replica while the context is open -> seconds waited for it. See `ReplicaQueue.entered`.

        Raises QueueFull, QueueTimeout, Withdrawn: also where another turn tries it out, and was placed here before.
        """
        place = self.queue.entered(tenant, cost=cost, background=background, going_on=going_on)
        async with place as waited_s:
            trial, task = self.half_open, asyncio.current_task()
            if trial and self.trials:
                raise Withdrawn(f"{self.name} is on trial, and another turn tries it", replica=self.name)
            assert task is not None
            self.trials += trial
            self.in_flight += 1
            self.inside[task] = False
            try:
                yield waited_s
            except asyncio.CancelledError:
                if self.inside[task] and task.uncancel() == 0:
                    raise Silent(f"{self.name} answers neither probes nor turns", replica=self.name) from None
                raise
            finally:
                self.in_flight -= 1
                self.trials -= trial
                del self.inside[task]

    def abandon(self) -> None:
        """All that runs there goes on elsewhere, or fails: raises Silent in each place that is taken."""
        for task, told in self.inside.items():
            if not told:
                self.inside[task] = True
                task.cancel()

    # ---- what traffic shows

    def failed(self, error: EngineError, now: float, *, lost: bool) -> None:
        """Note a failure of this replica itself (not of a request). A busy one is not a failed one."""
        if isinstance(error, Withdrawn):
            return
        self.last_error = str(error)
        if isinstance(error, EngineOverloaded) or not self.healthy:  # the others of those that it took with it
            return
        self.failures += 1
        if lost or self.half_open or self.failures >= FAILURES_TO_OPEN:
            self._rest(str(error), now)

    def answered(self, now: float) -> None:
        """A turn was answered, or at least begun to be."""
        self.failures = 0
        if self.half_open:
            self.half_open, self.rest_s = False, REST_S
            self.note("a turn was answered", now)

    def _rest(self, reason: str, now: float) -> None:
        if self.half_open:
            self.rest_s = min(2 * self.rest_s, MOST_REST_S)
        self.healthy, self.half_open, self.was_down = False, False, False
        self.rest_until = now + self.rest_s
        self.note(reason, now)
        self.queue.withdraw(f"{self.name} failed: {reason}")

    # ---- what probes show

    def probe_answered(self, capabilities: Capabilities, load: EngineLoad, now: float) -> None:
        old = self.capabilities
        restarted = old is not None and old.epoch != capabilities.epoch
        self.capabilities, self.load, self.probed_at, self.late = capabilities, load, now, 0
        self.queue.admit_at_most(self.max_in_flight or _said(capabilities.max_running) or DEFAULT_LIMIT)
        if self.healthy:
            if restarted:
                self.note("it was restarted", now)
            return
        if old is None or restarted or self.was_down:
            self.healthy, self.half_open, self.was_down = True, False, False
            self.failures, self.rest_until, self.rest_s = 0, 0.0, REST_S
            self.last_error = None
            self.note("it was restarted" if restarted else "it answers", now)
        elif now >= self.rest_until:
            self.healthy, self.half_open = True, True
            self.note("it answers probes; the next turn tries it", now)

    def probe_failed(self, reason: str, now: float, *, late: bool) -> None:
        """`late`: no answer in time, which one busy moment may explain, and does where turns are being answered."""
        if late and now - self.heard_at < HEARD_S:
            return
        self.probed_at, self.last_error = now, reason
        self.late = self.late + 1 if late else 0
        if late and self.healthy and self.late < LATE_TO_OPEN:
            return
        before = self.state
        self.healthy, self.half_open, self.was_down = False, False, True
        if before != self.state or not self.history:
            self.note(reason, now)
            self.queue.withdraw(f"{self.name} does not answer: {reason}")

    # ---- what an operator wants

    def drain(self, reason: str, now: float, *, drained: bool = False) -> None:
        """Take no more turns; those that wait for it go elsewhere, those that run end."""
        if (self.draining, self.drained) == (True, drained):
            return
        self.draining, self.drained = True, drained
        self.note(reason, now)
        self.queue.withdraw(f"{self.name} is drained")

    def undrain(self, now: float, reason: str = "") -> None:
        if self.draining:
            self.draining = self.drained = False
            self.note(reason or "it takes turns again", now)

    def note(self, reason: str, now: float) -> None:
        """Remember how it is now, and why; the log hears of its losses and its returns."""
        state, before = self.state, self.history[-1].state if self.history else None
        self.history.append(Change(now, state, reason))
        if state in LOST:
            log.warning("a replica takes no turns", replica=self.name, state=state, reason=reason)
        elif before in LOST:
            log.info("a replica is back", replica=self.name, state=state, reason=reason)


def _said(max_running: object) -> int | None:
    """What an engine says it works on at once, where that is a number."""
    if not isinstance(max_running, int) or isinstance(max_running, bool):
        return None
    return max_running if max_running > 0 else None
