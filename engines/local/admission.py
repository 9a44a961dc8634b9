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
    """`waiting`: taken, prompt not yet in the model. Beyond `max_waiting` of them a request is refused at once."""

    def __init__(self, backend: Backend, metrics: Metrics, *, max_waiting: int, clock: Callable[[], float]) -> None:
        self._backend, self._metrics, self._max_waiting, self._clock = backend, metrics, max_waiting, clock
        self.running = 0
        self.waiting = 0

    def check(self, places: int = 1) -> None:
        """Raises Refusal(overloaded) where `places` more would not fit in the queue."""
        if self.waiting + places > self._max_waiting:
            self._metrics.refused("overloaded")
            raise Refusal("overloaded", f"{self.waiting} requests wait; at most {self._max_waiting} may")

    async def generate(self, request: WireRequest) -> AsyncGenerator[list[Event], None]:
        """As Backend.generate. Raises only Refusal."""
        self.check()
        began_s, started, first, end = self._clock(), False, False, "cancelled"
        self.waiting += 1
        try:
            async with aclosing(self._backend.generate(request)) as answer:
                async for events in answer:
                    if events and not started:
                        started = True
                        self.waiting -= 1
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
                self.waiting -= 1
            self._metrics.ended(end, self._clock() - began_s)
