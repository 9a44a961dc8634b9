"""A database that cannot be written, is locked, hangs or is gone: the caller hears of it, and it heals by itself."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from gateway.store.database import connect
from gateway.store.records import Begun, StoreUnavailable
from gateway.store.schema import migrate
from gateway.store.sessions import Store, open_store
from tests.gateway.store.values import SESSION, TENANT, begin, committing, compaction, finish, said, session

pytestmark = pytest.mark.anyio
SENTENCE = "the lighthouse keeper planted this sentence"


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "turnkeep.db"
    await migrate(f"sqlite:///{path}")
    return path


@contextmanager
def full_disk(path: Path) -> Iterator[None]:
    """No file of this process may grow beyond the database and its log as they are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(file.stat().st_size for file in path.parent.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_told_to_every_waiter_and_writing_goes_on_after_it(path: Path) -> None:
    async with open_store(f"sqlite:///{path}") as store:
        kept = await store.begin_turn(begin("t1", create=session()))
        assert isinstance(kept, Begun)
        long = said("x" * 500_000)
        with full_disk(path):
            results = await asyncio.gather(
                *(
                    store.begin_turn(begin(f"b{n}", session_id=f"b{n}", create=session(f"b{n}"), input=long))
                    for n in range(3)
                ),
                return_exceptions=True,
            )
            assert [type(result) for result in results] == [StoreUnavailable] * 3
            with pytest.raises(StoreUnavailable):
                await store.finish_turn(finish("t1", kept.fence, output=long))
            assert (await store.get_session(TENANT, SESSION)) is not None  # still readable
        await store.finish_turn(finish("t1", kept.fence))
        assert isinstance(await store.begin_turn(begin("b0", session_id="b0", create=session("b0"), input=long)), Begun)
        assert [turn.turn.id for turn in await store.recent_turns()] != []
        assert (await store.overview()).turns == {"completed": 1, "in_progress": 1}


async def test_a_locked_database_is_waited_for_and_then_given_up(path: Path) -> None:
    async with open_store(f"sqlite:///{path}", busy_timeout_s=0.3) as store:
        await store.create_session(session())
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            start = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await store.begin_turn(begin("t1"))
            assert 0.2 < time.monotonic() - start < 3.0
            with pytest.raises(StoreUnavailable):
                await store.ping()
            waiting = asyncio.create_task(store.begin_turn(begin("t2")))
            await asyncio.sleep(0.05)
            other.execute("COMMIT")
            assert isinstance(await waiting, Begun)
        await store.ping()


async def test_a_database_that_was_moved_away_and_back_heals(path: Path) -> None:
    async with open_store(f"sqlite:///{path}") as store:
        await store.create_session(session())
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    away = path.with_suffix(".away")
    os.rename(path, away)
    os.mkdir(path)  # so that it cannot be opened
    database = connect(f"sqlite:///{path}")
    with pytest.raises(StoreUnavailable):
        await database.write(lambda connection: connection.execute(text("DELETE FROM probe")))
    os.rmdir(path)
    os.rename(away, path)
    assert (
        await database.read(lambda connection: connection.execute(text("SELECT id FROM sessions")).scalar_one()) == "s1"
    )
    await database.close()


async def test_nothing_goes_into_a_file_that_bears_the_name_no_more(path: Path) -> None:
    away = path.with_suffix(".away")
    async with open_store(f"sqlite:///{path}") as store:
        await store.create_session(session())
        os.rename(path, away)
        for _ in range(2):  # by the connection that has it open, and by a new one
            with pytest.raises(StoreUnavailable):
                await store.begin_turn(begin("t1"))
            with pytest.raises(StoreUnavailable):
                await store.get_session(TENANT, SESSION)
        assert store.away
        assert path.name not in os.listdir(path.parent), "an empty database was made"
        os.rename(away, path)
        assert isinstance(await store.begin_turn(begin("t1")), Begun)
        assert not store.away


async def test_a_writer_that_is_closed_refuses(path: Path) -> None:
    async with open_store(f"sqlite:///{path}") as store:
        pass
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.begin_turn(begin("t1", create=session()))


async def test_closing_writes_what_waits(path: Path) -> None:
    async with open_store(f"sqlite:///{path}") as store:
        tasks = [
            asyncio.create_task(store.begin_turn(begin(f"t{n}", session_id=f"s{n}", create=session(f"s{n}"))))
            for n in range(5)
        ]
        await asyncio.sleep(0)
    assert [type(await task) for task in tasks] == [Begun] * 5


async def test_a_begin_whose_caller_left_while_it_waited_is_not_written(path: Path) -> None:
    async with open_store(f"sqlite:///{path}", busy_timeout_s=5) as store:
        await store.create_session(session())
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            first = asyncio.create_task(store.begin_turn(begin("first", session_id="x", create=session("x"))))
            await asyncio.sleep(0.05)  # it stands before the lock; what comes now waits behind it
            left = asyncio.create_task(store.begin_turn(begin("left")))
            await asyncio.sleep(0.05)
            left.cancel()
            other.execute("COMMIT")
        await first
        with pytest.raises(asyncio.CancelledError):
            await left
        await store.ping()
        assert await store.list_turns(TENANT, SESSION) == ()


async def test_an_erased_session_s_words_are_in_no_file(path: Path) -> None:
    async with open_store(f"sqlite:///{path}") as store:
        for name in ("s1", "s2"):
            new = session(name, title=f"{SENTENCE} {name}", system=SENTENCE + name, metadata={"k": SENTENCE + name})
            began = await store.begin_turn(
                begin(f"{name}-t", session_id=name, create=new, input=said(f"{SENTENCE} {name} " * 2000))
            )
            assert isinstance(began, Begun)
            await store.append_events(TENANT, name, f"{name}-t", 0, [f"{SENTENCE}{name}".encode()])
            await store.finish_turn(
                finish(f"{name}-t", began.fence, session_id=name, output=said(f"{SENTENCE} {name}", "assistant"))
            )
            words = {"text": f"{SENTENCE}{name} " * 500}
            planned = compaction(f"{name}-c", f"{name}-t", 0, session_id=name, plan=words)
            await store.begin_compaction(planned)
            told = committing(f"{name}-t", 0, view=words, plan=words, report=words)
            await store.commit_compaction(TENANT, name, planned.id, **told)
        assert sentences(path, "s1") > 0
        await store.delete_session(TENANT, "s1")
        assert sentences(path, "s1") == 0
        assert sentences(path, "s2") > 1000


def sentences(path: Path, name: str) -> int:
    whole = b"".join(file.read_bytes() for file in path.parent.iterdir())
    return whole.count(f"{SENTENCE} {name}".encode()) + whole.count(f"{SENTENCE}{name}".encode())


# ---- PostgreSQL


@pytest.mark.postgres
async def test_cut_connections_are_replaced(migrated_postgres: str, clean: Store) -> None:
    await clean.create_session(session())
    assert await killed(migrated_postgres) > 0
    await clean.ping()
    assert isinstance(await clean.begin_turn(begin("t1")), Begun)


async def killed(url: str) -> int:
    """Cut every other connection to this database."""
    raw = await asyncpg.connect(**_address(url))
    try:
        rows = await raw.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return len(rows)
    finally:
        await raw.close()


@pytest.mark.postgres
async def test_a_row_lock_held_by_another_is_waited_for_and_then_given_up(migrated_postgres: str, clean: Store) -> None:
    await clean.create_session(session())
    raw = await asyncpg.connect(**_address(migrated_postgres))
    try:
        async with raw.transaction():
            await raw.execute("SELECT 1 FROM sessions WHERE id = 's1' FOR UPDATE")
            with pytest.raises(StoreUnavailable):
                await clean.begin_turn(begin("t1"))
    finally:
        await raw.close()
    assert isinstance(await clean.begin_turn(begin("t1")), Begun)


@pytest.mark.postgres
async def test_no_free_connection_is_waited_for_and_then_given_up(migrated_postgres: str) -> None:
    database = connect(migrated_postgres, busy_timeout_s=0.5)
    sleepers = [
        asyncio.create_task(database.read(lambda c: c.execute(text("SELECT pg_sleep(0.45)")))) for _ in range(24)
    ]
    told = await asyncio.gather(*sleepers, return_exceptions=True)
    assert {type(one) for one in told if isinstance(one, Exception)} == {StoreUnavailable}
    assert sum(not isinstance(one, Exception) for one in told) >= 8
    await database.close()


@pytest.mark.postgres
@pytest.mark.skipif("TURNKEEP_TEST_POSTGRES_URL" in os.environ, reason="stops processes of a server of its own")
async def test_a_server_that_hangs_is_given_up_in_time(migrated_postgres: str, clean: Store) -> None:
    await clean.create_session(session())
    raw = await asyncpg.connect(**_address(migrated_postgres))
    pids = await raw.fetch(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'turnkeep' AND datname = current_database()"
    )
    await raw.close()
    for row in pids:
        os.kill(row["pid"], signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await clean.begin_turn(begin("t1"))
        assert time.monotonic() - start < 5.0
    finally:
        for row in pids:
            os.kill(row["pid"], signal.SIGCONT)
    assert isinstance(await clean.begin_turn(begin("t1")), Begun)


@pytest.fixture
async def clean(migrated_postgres: str) -> object:
    from tests.gateway.store.conftest import EMPTY, say

    await say(migrated_postgres, EMPTY)
    async with open_store(migrated_postgres, busy_timeout_s=0.5) as store:
        yield store


def _address(url: str) -> dict[str, object]:
    parsed = make_url(url)
    return {
        "user": parsed.username,
        "password": parsed.password or None,
        "host": parsed.host or parsed.query.get("host"),
        "port": parsed.port,
        "database": parsed.database,
    }


async def test_nobody_listens() -> None:
    database = connect("postgresql://nobody@127.0.0.1:9/none", busy_timeout_s=1.0)
    with pytest.raises(StoreUnavailable):
        await database.read(lambda connection: connection.execute(text("SELECT 1")))
    await database.close()
