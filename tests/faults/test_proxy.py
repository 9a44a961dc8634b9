"""The fault proxy does what it says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.proxy import Cut, Drip, Fault, FaultProxy, Pass, Refuse, Stall

pytestmark = pytest.mark.anyio
SAID = b"0123456789" * 10


@asynccontextmanager
async def through(fault: Fault) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, FaultProxy]]:
    """A client of a server that reads a line and answers SAID, with the proxy between."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            writer.write(SAID)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, FaultProxy("127.0.0.1", port, fault=fault) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"go\n")
        try:
            yield reader, writer, proxy
        finally:
            writer.close()


async def test_pass_changes_nothing() -> None:
    async with through(Pass()) as (reader, _, proxy):
        assert await reader.read() == SAID
        assert proxy.accepted == 1


async def test_stall_goes_silent_and_stays_open() -> None:
    async with through(Stall(after_bytes=30)) as (reader, _, proxy):
        assert await reader.readexactly(30) == SAID[:30]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)
        assert proxy.open_connections == 1


async def test_cut_in_good_order_ends_after_its_bytes() -> None:
    async with through(Cut(after_bytes=30, reset=False)) as (reader, _, _):
        assert await reader.read() == SAID[:30]


async def test_cut_with_a_reset_is_a_reset() -> None:
    async with through(Cut(after_bytes=0)) as (reader, _, _):
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_drip_takes_its_time() -> None:
    async with through(Drip(bytes_per_s=400)) as (reader, _, _):
        started = time.monotonic()
        assert await reader.readexactly(100) == SAID
        assert time.monotonic() - started >= 0.15


async def test_refuse_resets() -> None:
    async with through(Refuse()) as (reader, _, proxy):
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert proxy.accepted == 1


async def test_a_client_that_leaves_closes_the_other_end() -> None:
    async with through(Stall()) as (_, writer, proxy):
        await asyncio.sleep(0.05)
        assert proxy.open_connections == 1
        writer.close()
        async with asyncio.timeout(0.5):
            while proxy.open_connections:  # noqa: ASYNC110 - the other end of a socket
                await asyncio.sleep(0.005)
