"""The few ASGI moves the front needs, without a layer on the hot path: body with a limit, JSON out, events out,
leaving clients. Knows nothing of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import orjson
from starlette.types import Message, Receive, Scope, Send

from engines.contract import EngineError
from engines.local.refusal import RETRY_AFTER_S, Refusal, refusal

SEND_TIMEOUT_S = 60.0  # a client that reads nothing for so long is gone
Call = Callable[[Scope, Receive, Send], Awaitable[None]]
JSON = b"application/json"


class ClientLeft(Exception):
    """The connection closed before the request was whole: nobody is there to answer."""


class Door:
    """An ASGI endpoint whose refusals become answers: the one place where they do."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._call(scope, receive, send)
        except Refusal as refused:
            await send_refusal(send, refused)
        except EngineError as error:
            await send_refusal(send, refusal(error))
        except ClientLeft:
            return


async def read_body(scope: Scope, receive: Receive, *, limit: int, content_type: str) -> bytes:
    """The whole body. Raises Refusal for another content type, an encoded body, or more than `limit` bytes."""
    pieces = [piece async for piece in body_pieces(scope, receive, limit=limit, content_type=content_type)]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def body_pieces(scope: Scope, receive: Receive, *, limit: int, content_type: str) -> AsyncGenerator[bytes, None]:
    """The body as it comes, at least one piece. Raises as `read_body`."""
    headers = {name: value for name, value in scope["headers"] if name in _WANTED}
    given = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if given != content_type:
        raise Refusal("unsupported_media_type", f"Content-Type must be {content_type}")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Refusal("unsupported_media_type", "an encoded body is not taken")
    too_large = Refusal("request_too_large", f"the body is larger than {limit} bytes")
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large
        yield piece
        if not message.get("more_body", False):
            return


_WANTED = frozenset({b"content-type", b"content-encoding", b"content-length"})


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, content_type: bytes = JSON, retry_after_s: int | None = None
) -> None:
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
    if retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % retry_after_s))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: object, *, status: int = 200) -> None:
    await send_bytes(send, orjson.dumps(value), status=status)


async def send_refusal(send: Send, refused: Refusal) -> None:
    retry = RETRY_AFTER_S if refused.status == 503 else None
    await send_bytes(send, refused.body(), status=refused.status, retry_after_s=retry)


async def send_events(
    send: Send, receive: Receive, pieces: AsyncGenerator[bytes, None], *, timeout_s: float = SEND_TIMEOUT_S
) -> None:
    """`pieces` as an event stream; closes them, early when the client leaves or reads nothing for `timeout_s`.

    The status waits for the first piece (which may be empty): until then the generator may raise Refusal.
    """
    async with while_connected(receive, timeout_s) as pulse, aclosing(pieces):
        piece = await anext(pieces, None)
        await send(_start())
        while piece is not None:
            if piece:
                pulse.sending = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                pulse.sending = False
                pulse.sends += 1
            piece = await anext(pieces, None)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def send_pieces(
    send: Send,
    receive: Receive,
    pieces: AsyncGenerator[bytes, None],
    *,
    content_type: bytes,
    timeout_s: float = SEND_TIMEOUT_S,
) -> None:
    """`pieces` as one body of unknown length; closes them, early when the client leaves or reads nothing."""
    headers = [(b"content-type", content_type), (b"cache-control", b"no-store")]
    async with while_connected(receive, timeout_s) as pulse, aclosing(pieces):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for piece in pieces:
            pulse.sending = True
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            pulse.sending = False
            pulse.sends += 1
        await send({"type": "http.response.body", "body": b""})


def _start() -> Message:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


@dataclass(slots=True)
class Pulse:
    """Whether the client takes what is sent. Looked at now and then: asyncio.timeout around each send would double
    a chunk's cost (15 of 30 microseconds).
    """

    sending: bool = False
    sends: int = 0


@asynccontextmanager
async def while_connected(receive: Receive, timeout_s: float = SEND_TIMEOUT_S) -> AsyncIterator[Pulse]:
    """Cancels what is inside when the client leaves or is stuck in one send for `timeout_s` (up to twice that), and
    then goes on quietly. The request's body must have been read.
    """
    task, loop, pulse = asyncio.current_task(), asyncio.get_running_loop(), Pulse()
    assert task is not None
    inside, gone, seen = True, False, -1
    timer: asyncio.TimerHandle

    def left(_: object = None) -> None:
        nonlocal gone
        if inside and not gone:
            gone = True
            task.cancel()

    def look() -> None:
        nonlocal seen, timer
        if pulse.sending and pulse.sends == seen:
            left()
        seen = pulse.sends if pulse.sending else -1
        timer = loop.call_later(timeout_s, look)

    timer = loop.call_later(timeout_s, look)
    watch = asyncio.ensure_future(_disconnect(receive))
    watch.add_done_callback(left)
    try:
        yield pulse
    except asyncio.CancelledError:
        if not gone or task.uncancel():
            raise
    finally:
        inside = False
        timer.cancel()
        watch.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
