"""The engine's KV events over ZeroMQ, in vLLM's format and ports: any router that reads vLLM's reads ours.

    PUB     [topic "", seq 8 bytes big-endian, payload]                         kv_events: what a payload is
    ROUTER  [client, "", start 8 bytes big-endian]  ->  ["", seq, payload] ... ["", -1, ""]     the batches kept

Lives in the front's process and loop: the model never waits for a subscriber. A PUB socket drops what a slow
subscriber does not take, who sees the gap and asks for a replay; a replay waits for its client, and gives it up.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from engines.kv_events import EventBatch, encode_batch
from engines.kv_snapshot import END, Head, encode_head, encode_part, mark_of
from engines.kv_stream import KvStream, ResidentBlocks

KEEP_BATCHES = 10_000  # for replay, as vLLM keeps
KEEP_BYTES = 64 << 20
SEND_HIGH_WATER = 10_000  # batches that one slow subscriber may lag behind before it loses some
REPLAY_HIGH_WATER = 1000
REPLAY_PATIENCE_S = 5.0  # of a client that asked for a replay and does not read it
REPLAYS_AT_ONCE = 8
SENDS_AT_ONCE = 50  # then others have their turn on the loop
RETRY_S = 0.02
END_SEQ = (-1).to_bytes(8, "big", signed=True)
SEQ = struct.Struct(">Q")
TOPIC = b""


class KvEndpointRefused(Exception):
    """Where KV events were to be published nobody can bind."""


class KvPublisher:
    """Publishes `stream` while its context is open. Raises KvEndpointRefused.

    `endpoint` is `tcp://HOST:PORT` (0: a free port) or `ipc://PATH`; without `replay` the replay is beside it: a free
    port of the same host, or PATH.replay. `endpoint` and `replay` then say what was bound.
    """

    def __init__(self, stream: KvStream, endpoint: str, *, replay: str | None = None) -> None:
        self.stream = stream
        self.endpoint, self.replay = endpoint, replay or beside(endpoint)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0

    async def __aenter__(self) -> KvPublisher:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = zmq.asyncio.Socket(self._context, zmq.ROUTER)
        try:
            self._pub.set_hwm(SEND_HIGH_WATER)
            self._router.set_hwm(REPLAY_HIGH_WATER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full or a gone client is an error, not a loss
            _bind(self._pub, self.endpoint)
            _bind(self._router, self.replay)
        except BaseException:
            self._close()
            raise
        self.endpoint, self.replay = (
            str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0") for socket in (self._pub, self._router)
        )
        self._come(self.stream.last)
        self._stop = self.stream.listen(self._come)
        self._replaying = asyncio.create_task(self._serve_replays(), name="kv-replay")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self._close()

    def _close(self) -> None:
        self._pub.close(0)
        self._router.close(0)
        self._context.term()

    def forget_past(self) -> None:
        """Keep the last batch alone: those before it name the ids of blocks that may be gone. Who asks for them reads
        a snapshot instead."""
        last = self._kept.pop()
        self._kept.clear()
        self._kept.append(last)
        self._kept_bytes = len(last[1])

    def snapshot(self) -> AsyncGenerator[bytes, None]:
        """What the cache holds now, in the form of kv_snapshot. Taken at once, told at the reader's pace."""
        seq, payload = self._kept[-1]
        return _told(Head(seq, self.stream.last.at, mark_of(payload)), self.stream.resident.copy())

    def _come(self, batch: EventBatch) -> None:
        payload = encode_batch(batch)
        self._kept.append((batch.seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEEP_BATCHES or (self._kept_bytes > KEEP_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._pub.send_multipart((TOPIC, SEQ.pack(batch.seq), payload), zmq.NOBLOCK)

    async def _serve_replays(self) -> None:
        async with asyncio.TaskGroup() as replays:
            running: set[asyncio.Task[None]] = set()
            while True:
                client, *asked = await self._router.recv_multipart()
                if len(asked) != 2 or len(asked[1]) != SEQ.size:
                    continue
                if len(running) == REPLAYS_AT_ONCE:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = replays.create_task(self._replay_to(client, *SEQ.unpack(asked[1])))
                running.add(task)
                task.add_done_callback(running.discard)

    async def _replay_to(self, client: bytes, start: int) -> None:
        """The batches from `start` on that are kept now. A client that has gone or does not read is given up: it asks
        again when it wants to know."""
        parts = [(SEQ.pack(seq), payload) for seq, payload in self._kept if seq >= start]
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError, zmq.ZMQError):
            async with asyncio.timeout(REPLAY_PATIENCE_S) as patience:
                for number, (seq, payload) in enumerate((*parts, (END_SEQ, b""))):
                    await self._send(client, seq, payload)
                    patience.reschedule(loop.time() + REPLAY_PATIENCE_S)
                    if number % SENDS_AT_ONCE == 0:
                        await asyncio.sleep(0)

    async def _send(self, client: bytes, seq: bytes, payload: bytes) -> None:
        while True:
            try:
                await self._router.send_multipart((client, b"", seq, payload), zmq.NOBLOCK)
                return
            except zmq.Again:
                await asyncio.sleep(RETRY_S)


async def _told(head: Head, resident: ResidentBlocks) -> AsyncGenerator[bytes, None]:
    parts = resident.parts()
    yield encode_head(head)
    # the first step sorts all blocks: 1 us a block
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield encode_part(head.seq, part)
    yield END


def _bind(socket: zmq.Socket[Any], endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise KvEndpointRefused(f"KV events cannot be published at {endpoint}: {error}") from None


def beside(endpoint: str) -> str:
    """Where the replay of an endpoint is if nobody says. Raises KvEndpointRefused for one of another kind."""
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc" and rest:
        return f"{endpoint}.replay"
    host, colon, port = rest.rpartition(":")
    if kind != "tcp" or not (host and colon and port.isdigit() and int(port) < 1 << 16):
        raise KvEndpointRefused(f"KV events go to tcp://HOST:PORT or ipc://PATH, not {endpoint!r}")
    return f"tcp://{host}:0"
