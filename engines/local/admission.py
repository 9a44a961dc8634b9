"""Bounds how many requests wait, and watches each from request to end. Wraps a Backend's `generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from engines.contract import EngineError
from engines.local.backend import Backend
from engines.local.metrics import Metrics
from engines.local.refusal import Refusal, refusal
from engines.local.wire import Event, WireRequest


class Admission:
    """`waiting`: taken, prompt not yet in the model. Beyond `max_waiting` of them a request is refused at once;
    background work (priority above 0) that waits takes no foreground request's place.
    """

    def __init__(self, backend: Backend, metrics: Metrics, *, max_waiting: int, clock: Callable[[], float]) -> None:
        self._backend, self._metrics, self._max_waiting, self._clock = backend, metrics, max_waiting, clock
        self.running = 0
        self.waiting = 0
        self._background = 0  # of those that wait

    def check(self, priority: int, places: int = 1) -> None:
        """Raises Refusal(overloaded) where `places` more of that priority would not fit in the queue."""
        waiting = self.waiting if priority > 0 else self.waiting - self._background
        if waiting + places > self._max_waiting:
            self._metrics.refused("overloaded")
            raise Refusal("overloaded", f"{waiting} requests wait; at most {self._max_waiting} may")

    async def generate(self, request: WireRequest) -> AsyncGenerator[list[Event], None]:
        """As Backend.generate. Raises only Refusal."""
        self.check(request.priority)
        began_s, started, first, end = self._clock(), False, False, "cancelled"
        self._wait(request, 1)
        try:
            async with aclosing(self._backend.generate(request)) as answer:
                async for events in answer:
                    if events and not started:
                        started = True
                        self._wait(request, -1)
                        self.running += 1
                    if not first and any(event.kind != "started" for event in events):
                        first = True
                        self._metrics.first_token(self._clock() - began_s)
                    if events and (last := events[-1]).kind in ("last", "error"):
                        end = "finished" if last.kind == "last" else "failed"
                        if last.usage is not None:
                            self._metrics.used(last.usage)
                    yield events
        except Refusal as refused:
            end = refused.code
            raise
        except EngineError as error:
            end = (failure := refusal(error)).code
            raise failure from error
        finally:
            if started:
                self.running -= 1
            else:
                self._wait(request, -1)
            self._metrics.ended(end, self._clock() - began_s)

    def _wait(self, request: WireRequest, more: int) -> None:
        self.waiting += more
        if request.priority > 0:
            self._background += more
