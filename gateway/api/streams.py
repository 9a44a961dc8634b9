"""Answers that take a while: they watch for a client that leaves, and turn an early failure into its status.

    EventStream   server-sent events: heartbeats, one write for all that is ready, a clear end
    Awaited       one JSON body, sent when it is there

A failure before the first byte is an ordinary error response; after it, the source's last event says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.problems import error_response
from gateway.errors import GatewayError
from gateway.sessions.failures import as_event, from_store
from gateway.store.records import StoreUnavailable

HEARTBEAT = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks a buffering proxy to pass events on at once
)


class EventStream(Response):
    """Encoded events from `source`; each value it yields is written at once.

    `headers`: read when the first value is there, so that the source may still say some. `failed`: the last event of a
    source that raises after the status was sent.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        heartbeat_s: float,
        headers: Mapping[str, str] | None = None,
        failed: Callable[[GatewayError], bytes] | None = None,
    ) -> None:
        super().__init__()
        self._source = source
        self._heartbeat_s = heartbeat_s
        self._own_headers = {} if headers is None else headers
        self._failed = failed or failed_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_client_stays(receive), aclosing(self._source) as source:
            first = asyncio.ensure_future(anext(source, b""))
            try:
                await asyncio.wait({first}, timeout=self._heartbeat_s)
                if first.done() and (error := first.exception()) is not None:
                    if (told := told_of(error)) is None:
                        raise error
                    await error_response(told, str(scope.get("turnkeep.request_id", "")))(scope, receive, send)
                    return
                own = [(name.encode(), value.encode()) for name, value in self._own_headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *own]})
                while not first.done():
                    await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
                    await asyncio.wait({first}, timeout=self._heartbeat_s)
            except asyncio.CancelledError:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                raise
            try:
                await send({"type": "http.response.body", "body": first.result(), "more_body": True})
                await self._write(source, send)
            except (GatewayError, StoreUnavailable) as error:
                told = told_of(error)
                assert told is not None
                await send({"type": "http.response.body", "body": self._failed(told), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, source: AsyncGenerator[bytes, None], send: Send) -> None:
        pulse = asyncio.create_task(_heartbeat(send, self._heartbeat_s))
        try:
            async for data in source:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            pulse.cancel()


class Awaited(Response):
    """The response that `make` returns, awaited while the client stays; left alone, `make` is cancelled."""

    def __init__(self, make: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _while_client_stays(receive):
            try:
                response = await self._make()
            except GatewayError as error:
                response = error_response(error, str(scope.get("turnkeep.request_id", "")))
            await response(scope, receive, send)


@asynccontextmanager
async def _while_client_stays(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body when the client leaves, and swallow that cancellation only."""
    writer = asyncio.current_task()
    assert writer is not None
    left = asyncio.create_task(_client_left(receive))
    gone = False

    def stop(_: asyncio.Task[None]) -> None:
        nonlocal gone
        gone = True
        writer.cancel()

    left.add_done_callback(stop)
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        writer.uncancel()
    finally:
        left.remove_done_callback(stop)
        left.cancel()


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _heartbeat(send: Send, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})


def last_event_id(request: Request, starting_after: int) -> int:
    """The sequence number to go on after: of the header Last-Event-ID, where it is one."""
    last = request.headers.get("last-event-id", "")
    return int(last) if last.isascii() and last.isdigit() and len(last) < 10 else starting_after


def told_of(error: BaseException) -> GatewayError | None:
    """What a client is told of it; None: it is a mistake of ours, which the edge tells of."""
    if isinstance(error, StoreUnavailable):
        return from_store(error)
    return error if isinstance(error, GatewayError) else None


def failed_event(error: GatewayError) -> bytes:
    """As OpenAI's clients read it."""
    return event(orjson.dumps({"error": as_event(error)})) + b"data: [DONE]\n\n"


def failed_named(error: GatewayError) -> bytes:
    """As an event by name, which has no number: what the reader has seen stays the last."""
    return event(orjson.dumps({"type": "error", "error": as_event(error)}), name="error")


def event(data: bytes, *, name: str | None = None, id: int | None = None) -> bytes:
    """One event; `data` is a single line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    if id is not None:
        head += b"id: " + str(id).encode() + b"\n"
    return head + b"data: " + data + b"\n\n"
