"""A running turn as a log of events that any number of readers may follow, from any sequence number.

The gateway runs the turn, not the request: a reader that leaves takes nothing with it. Events are numbered from 1;
the last one is always a TurnEnded. Knows no engine, no HTTP, and writes to no store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from compression.conversation import Item, TurnStatus
from engines.contract import TokenLogprob
from gateway.errors import GatewayError, Unavailable
from gateway.store.compaction_records import CompactionRecord


@dataclass(frozen=True, slots=True)
class TurnStarted:
    turn_id: str
    session_id: str | None
    seq: int | None
    model: str
    created_at: float
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Piece:
    """A piece of the answer. `index` numbers the tool calls; id and name come with a call's first piece.

    Never changed, though not frozen: one is made for every chunk, and a frozen one takes three times as long.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str = ""
    index: int = 0
    id: str | None = None
    name: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The terminal event, sent after the answer is durable. `error` says why it is not complete, where it is not."""

    turn_id: str
    session_id: str | None
    seq: int | None
    status: TurnStatus
    finish_reason: str | None
    output: tuple[Item, ...]
    usage: Mapping[str, Any]
    metadata: Mapping[str, Any]
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Compacted:
    """A compaction of the turn's session, before the turn or beside it. `record`: its row as it was then."""

    what: Literal["started", "completed", "failed"]
    record: CompactionRecord


@dataclass(frozen=True, slots=True)
class Stored:
    """An event that another gateway emitted, before this one went on with the turn: as it stands in the store."""

    type: str
    json: bytes


TurnEvent = TurnStarted | Piece | Compacted | Stored | TurnEnded


class HandedOver(Unavailable):
    """The turn goes on at another gateway; whoever waits for it here asks again, and there."""

    code = "turn_handed_over"


class TurnRun:
    """One turn while it runs, and for its readers a little longer."""

    def __init__(self, turn_id: str, *, tenant_id: str, session_id: str | None, on_disconnect: str) -> None:
        self.turn_id = turn_id
        self.tenant_id = tenant_id
        self.session_id = session_id
        self.on_disconnect = on_disconnect
        self.fence = 0
        self.started_at = time.monotonic()
        self.first_piece_at: float | None = None
        self.events: list[TurnEvent] = []
        self.ended: TurnEnded | None = None
        self.failure: GatewayError | None = None  # what a failed turn failed with, for whoever answers with a status
        self.cancel_reason: str | None = None
        self.unsaved: str | None = None  # why nothing of it is kept, where that was not asked for
        self.moved = False  # another gateway goes on with it: no more comes here
        self._on_cancel: Callable[[], object] | None = None
        self._readers = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: list[asyncio.Future[None]] = []  # for the next event
        self._end_waiters: list[asyncio.Future[None]] = []

    def emit(self, event: TurnEvent) -> None:
        self.events.append(event)
        if isinstance(event, TurnEnded):
            self.ended = event
            _wake(self._end_waiters)
        elif self.first_piece_at is None and isinstance(event, Piece):
            self.first_piece_at = time.monotonic()
        if self._waiters:
            _wake(self._waiters)

    def move(self) -> None:
        """Another gateway has the turn now; readers are let go."""
        self.moved = True
        _wake(self._waiters)
        _wake(self._end_waiters)

    def handed_over(self) -> HandedOver:
        """What a reader is told who cannot be sent on."""
        message = f"this gateway stops; turn {self.turn_id} goes on at another: send the request again"
        return HandedOver(message, retry_after_s=1.0)

    def cancel(self, reason: str) -> None:
        """Ask the turn to stop; the first reason stays."""
        if self.ended is None and self.cancel_reason is None:
            self.cancel_reason = reason
            if self._on_cancel is not None:
                self._on_cancel()

    def on_cancel(self, call: Callable[[], object]) -> None:
        """What to do on a cancel; done at once where it came before."""
        self._on_cancel = call
        if self.cancel_reason is not None:
            call()

    async def wait_beyond(self, count: int) -> None:
        """Until more than `count` events are there, or no more will come."""
        while len(self.events) <= count and self.ended is None and not self.moved:
            await self._waiter_in(self._waiters)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Counts whoever is inside as a reader. A reader that leaves may end the turn."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self.left_alone()

    async def follow(self, after: int = 0, *, watching: bool = False) -> AsyncGenerator[tuple[int, TurnEvent], None]:
        """(sequence number, event) for every event past `after`, to the end, as one of its readers; `watching`: without
        counting as one, so that neither staying nor leaving changes what becomes of the turn."""
        at = after
        with nullcontext() if watching else self.reading():
            while True:
                await self.wait_beyond(at)
                if at >= len(self.events):  # it has ended, and the reader has seen as much, or asks for more than was
                    return
                event = self.events[at]
                at += 1
                yield at, event
                if isinstance(event, TurnEnded):
                    return

    def left_alone(self) -> None:
        """Whoever waited for this turn is gone: where nobody else follows it, on_disconnect says what becomes of it."""
        if self._readers == 0 and self.ended is None and self.on_disconnect == "cancel":
            self.cancel("client_disconnected")

    async def wait_end(self) -> TurnEnded:
        """The terminal event, once it is there, without counting as a reader; what comes before wakes nobody here.

        Raises HandedOver where it comes at another gateway.
        """
        while self.ended is None:
            if self.moved:
                raise self.handed_over()
            await self._waiter_in(self._end_waiters)
        return self.ended

    def _waiter_in(self, waiters: list[asyncio.Future[None]]) -> asyncio.Future[None]:
        if self._loop is None:  # looked up once: each look-up is a system call, to see a fork
            self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = self._loop.create_future()
        waiters.append(waiter)
        return waiter


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
