"""A TCP proxy with faults, to stand between a gateway and an engine.

    client ---> FaultProxy ---> upstream          faults act on what the upstream sends

    async with FaultProxy("127.0.0.1", 8000) as proxy:
        proxy.fault = Cut(after_bytes=300)
        ... http://127.0.0.1:{proxy.port} ...

A fault is read when a connection opens and holds for it; one process may run many proxies. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Pass:
    """Everything goes through."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Silence after `after_bytes` of the upstream's; the connection stays open."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Both ends are closed after `after_bytes` of the upstream's; with a reset, or in good order."""

    after_bytes: int = 0
    reset: bool = True


@dataclass(frozen=True, slots=True)
class Drip:
    """`bytes_per_s` of the upstream's, one byte at a time."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """The connection is reset as soon as it is accepted."""


Fault = Pass | Stall | Cut | Drip | Refuse
PASS = Pass()
CHUNK = 65_536


class FaultProxy:
    """Accepts on `port` (chosen by the system unless given) and forwards to (`host`, `upstream_port`), or to the Unix
    socket whose path `host` is."""

    def __init__(self, host: str, upstream_port: int, *, port: int = 0, fault: Fault = PASS) -> None:
        self.fault = fault
        self.port = port
        self.open_connections = 0
        self.accepted = 0
        self._upstream = (host, upstream_port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def cut(self) -> None:
        """Reset every connection that is open now, whatever is on its way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        self.open_connections += 1
        try:
            await self._serve(self.fault, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one end went away, or the proxy closes: both ends are closed below
        finally:
            self.open_connections -= 1
            self._tasks.discard(task)
            await _close(writer)

    async def _serve(self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(fault, Refuse):
            _reset_on_close(writer)
            return
        host, port = self._upstream
        opened = asyncio.open_unix_connection(host) if host.startswith("/") else asyncio.open_connection(host, port)
        up_reader, up_writer = await opened
        up = asyncio.ensure_future(_forward(reader, up_writer))
        down = asyncio.ensure_future(_answer(fault, up_reader, writer))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for side in (up, down):
                side.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            if isinstance(fault, Cut) and fault.reset:
                _reset_on_close(writer)
            await _close(up_writer)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()


async def _answer(fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    seen = 0
    while data := await reader.read(CHUNK):
        if isinstance(fault, Stall | Cut):
            data = data[: max(0, fault.after_bytes - seen)]
        if isinstance(fault, Drip):
            for byte in data:
                writer.write(bytes((byte,)))
                await writer.drain()
                await asyncio.sleep(1 / fault.bytes_per_s)
        else:
            writer.write(data)
            await writer.drain()
        seen += len(data)
        if isinstance(fault, Cut) and seen >= fault.after_bytes:
            return
        if isinstance(fault, Stall) and seen >= fault.after_bytes:
            await asyncio.Event().wait()


def _reset_on_close(writer: asyncio.StreamWriter) -> None:
    """Closing sends RST: linger on, zero seconds."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
