"""A database that is held by somebody else, or away, while gateways want to write."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg

from gateway.store.database import normalise
from tests.gateway.store.conftest import say


@asynccontextmanager
async def held(url: str) -> AsyncIterator[None]:
    """Nobody else can write: SQLite's write lock, or a lock on the table of sessions."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(urlsplit(url).path, isolation_level=None, timeout=5)
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield
        finally:
            connection.close()
        return
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute("LOCK TABLE sessions IN EXCLUSIVE MODE")
            yield
    finally:
        await connection.close()


@asynccontextmanager
async def away(url: str, server: str) -> AsyncIterator[None]:
    """PostgreSQL drops this database's connections and takes none; SQLite is held."""
    if url.startswith("sqlite"):
        async with held(url):
            yield
        return
    name = str(normalise(url).database)
    await say(server, f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS false')
    try:
        for _ in range(2):  # one that was being opened just then
            await say(server, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
            await asyncio.sleep(0.1)
        yield
    finally:
        await say(server, f'ALTER DATABASE "{name}" WITH ALLOW_CONNECTIONS true')
