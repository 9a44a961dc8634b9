"""A publisher of KV events shaped as vLLM's (kv_events.py of its sources): PUB, and ROUTER for replays. It can be told
to lose a batch, to keep few, to answer no replay, and to start anew on the same ports."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import zmq
import zmq.asyncio

from engines.kv_events import BlockRemoved, BlockStored, EventBatch, Form, KvEvent, encode_batch

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    def __init__(self, *, keep: int = 10_000, rank: int = 0, form: Form = "map") -> None:
        self._context = zmq.Context()
        self._rank, self._form, self._keep = rank, form, keep
        self._ports = [0, 0]
        self._replays: asyncio.Task[None] | None = None
        self.answers = True
        self.asked: list[int] = []
        self.start()

    def start(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=self._keep)
        self.seq = 0
        self._pub = self._context.socket(zmq.PUB)
        self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        for place, socket in enumerate((self._pub, self._router)):
            socket.setsockopt(zmq.LINGER, 0)
            _bind(socket, self._ports[place])
            self._ports[place] = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1].rstrip("\0"))
        self._replays = asyncio.create_task(self._serve(self._router))

    async def stop(self) -> None:
        """As when the process ends: ports closed, everything forgotten."""
        assert self._replays is not None
        self._replays.cancel()
        with suppress(asyncio.CancelledError):
            await self._replays
        self._pub.close(0)
        self._router.close(0)

    async def close(self) -> None:
        await self.stop()
        self._context.destroy(linger=0)

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[0]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self._ports[1]}"

    def publish(self, *events: KvEvent, lost: bool = False, at: float | None = None) -> EventBatch:
        batch = EventBatch(self.seq, float(self.seq) if at is None else at, self._rank, events)
        self.send(encode_batch(batch, form=self._form), lost=lost)
        return batch

    def send(self, payload: bytes, *, lost: bool = False) -> None:
        if not lost:
            self._pub.send_multipart((b"", self.seq.to_bytes(8, "big"), payload))
        self.kept.append((self.seq, payload))
        self.seq += 1

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.answers:
                for seq, payload in list(self.kept):
                    if seq >= self.asked[-1]:
                        await router.send_multipart((client, b"", seq.to_bytes(8, "big"), payload))
                await router.send_multipart((client, b"", END, b""))


def _bind(socket: zmq.Socket[Any], port: int) -> None:
    """A port that was just closed is free a moment later."""
    for _ in range(200):
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return
        except zmq.ZMQError:
            time.sleep(0.01)
    raise AssertionError(f"port {port} is taken")


@asynccontextmanager
async def publisher(**options: object) -> AsyncIterator[Publisher]:
    made = Publisher(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


def name(number: int) -> bytes:
    return number.to_bytes(8, "big")


def stored(*numbers: int, parent: int | None = None) -> BlockStored:
    """Blocks of one token each, which is their number."""
    ids = b"".join(number.to_bytes(4, "little") for number in numbers)
    return BlockStored(tuple(name(number) for number in numbers), None if parent is None else name(parent), ids, 1)


def removed(*numbers: int) -> BlockRemoved:
    return BlockRemoved(tuple(name(number) for number in numbers))
