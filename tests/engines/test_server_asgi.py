"""The front's ASGI moves: who leaves or stops reading ends the answer, who stays gets all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest
from starlette.types import Message

from engines.local.asgi import send_events


@dataclass
class Client:
    """The other end: reads `reads` messages at once, then hangs; leaves when `leave` is set."""

    reads: int = 1_000_000
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    got: list[Message] = field(default_factory=list)

    async def send(self, message: Message) -> None:
        if len(self.got) >= self.reads:
            await asyncio.Event().wait()
        self.got.append(message)

    async def receive(self) -> Message:
        await self.leave.wait()
        return {"type": "http.disconnect"}


@dataclass
class Answer:
    pieces: int
    closed: bool = False

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            for _ in range(self.pieces):
                await asyncio.sleep(0.01)
                yield b"data: x\n\n"
            await asyncio.sleep(0 if self.pieces < 100 else 3600)
        finally:
            self.closed = True


def test_a_reading_client_gets_every_piece_and_done() -> None:
    async def check() -> None:
        client, answer = Client(), Answer(5)
        await send_events(client.send, client.receive, answer.stream(), timeout_s=0.005)
        bodies = [message["body"] for message in client.got[1:]]
        assert bodies == [b"data: x\n\n"] * 5 + [b"data: [DONE]\n\n"]
        assert answer.closed

    asyncio.run(check())


def test_a_client_that_leaves_ends_the_answer_quietly() -> None:
    async def check() -> None:
        client, answer = Client(), Answer(1000)
        asyncio.get_running_loop().call_later(0.05, client.leave.set)
        began_s = time.monotonic()
        await send_events(client.send, client.receive, answer.stream())
        assert time.monotonic() - began_s < 5, "the answer takes ten seconds and an hour"
        assert answer.closed

    asyncio.run(check())


def test_a_client_that_reads_nothing_is_cut_off_after_the_timeout() -> None:
    async def check() -> None:
        client, answer = Client(reads=3), Answer(1000)
        began_s = time.monotonic()
        await send_events(client.send, client.receive, answer.stream(), timeout_s=0.1)
        assert 0.1 <= time.monotonic() - began_s < 5
        assert answer.closed
        assert len(client.got) == 3

    asyncio.run(check())


def test_a_slow_answer_is_not_taken_for_a_slow_client() -> None:
    async def check() -> None:
        client, answer = Client(), Answer(20)
        await send_events(client.send, client.receive, answer.stream(), timeout_s=0.002)
        assert client.got[-1]["body"] == b"data: [DONE]\n\n"

    asyncio.run(check())


def test_cancelling_the_task_from_outside_is_not_swallowed() -> None:
    async def check() -> None:
        client, answer = Client(), Answer(1000)
        task = asyncio.create_task(send_events(client.send, client.receive, answer.stream()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert answer.closed

    asyncio.run(check())
