"""Migrations: from nothing to the newest schema and back, killed on the way, refused where they must be."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from gateway.store.database import connect
from gateway.store.schema import SchemaBehind, SchemaTooNew, migrate, schema_state
from gateway.store.sessions import open_store
from gateway.store.tables import metadata

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
SOURCE = "import sys, asyncio; from gateway.store.schema import migrate; asyncio.run(migrate(sys.argv[1]))"
HEAD = "0009"
MIGRATE = [sys.executable, "-c", SOURCE]


def differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), metadata))


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names())


async def ask(url: str, work: object) -> object:
    database = connect(url)
    try:
        return await database.write(work)  # type: ignore[arg-type]
    finally:
        await database.close()


async def test_blank_to_head_is_what_the_tables_say(empty_url: str) -> None:
    assert await migrate(empty_url) == HEAD
    assert await ask(empty_url, differences) == []
    assert await migrate(empty_url) == HEAD
    async with open_store(empty_url) as store:
        assert [tenant.id for tenant in (await store.list_tenants()).tenants] == ["default"]


async def test_down_to_nothing_and_up_again(empty_url: str) -> None:
    await migrate(empty_url)
    assert await migrate(empty_url, "base") == ""
    assert await ask(empty_url, tables) == {"alembic_version"}
    assert await migrate(empty_url, HEAD) == HEAD
    assert await ask(empty_url, differences) == []


SESSION = {
    "tenant_id": "acme",
    "id": "s1",
    "version": 3,
    "model": "small",
    "tools": "[]",
    "metadata": "{}",
    "policy": "{}",
    "origin": "api",
    "head_turn_id": "t1",
    "next_seq": 2,
    "created_at": 5.0,
    "updated_at": 6.0,
    "fence": 1,
    "cancel_requested": 0,
}
TURN = {
    "tenant_id": "acme",
    "id": "t1",
    "session_id": "s1",
    "seq": 1,
    "status": "completed",
    "model": "small",
    "fence": 1,
    "attempt": 1,
    "idempotency_key": "k",
    "on_disconnect": "finish",
    "created_at": 5.0,
    "user_ref": "",
    "open_answer": 0,
    "usage": "{}",
    "placement": "{}",
    "prefix_report": "{}",
    "metadata": "{}",
}

LATER = {**TURN, "id": "t2", "seq": 2, "idempotency_key": None}  # written as 0001 writes it, after the upgrade


def insert(connection: Connection, table: str, row: dict[str, object]) -> None:
    values = ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})"), row)


def rows_of_0001(connection: Connection) -> list[dict[str, object]]:
    """The same columns of the same rows, whatever was added since."""
    wanted = (("sessions", SESSION), ("turns", TURN))
    selects = (f"SELECT {', '.join(row)} FROM {table}" for table, row in wanted)
    return [dict(each) for select in selects for each in connection.execute(text(select)).mappings()]


async def test_rows_of_the_oldest_schema_are_served_by_the_newest_and_stay_when_it_goes(empty_url: str) -> None:
    await migrate(empty_url, "0001")

    def fill(connection: Connection) -> None:
        insert(connection, "sessions", SESSION)
        insert(connection, "turns", TURN)

    await ask(empty_url, fill)
    assert await migrate(empty_url) == HEAD
    async with open_store(empty_url) as store:
        record, turn = await store.get_session("acme", "s1"), await store.get_turn("acme", "s1", "t1")
        assert record is not None
        assert turn is not None
        assert (record.version, record.head_turn_id, record.view_version) == (3, "t1", 0)
        assert (turn.idempotency_key, turn.pinned) == ("k", False)
        assert await store.pin_turn("acme", "s1", "t1", True) is not None
        assert (await store.view_of("acme", "s1", "t1")).pinned == {"t1"}
    await ask(empty_url, lambda connection: insert(connection, "turns", LATER))
    assert await migrate(empty_url, "0001") == "0001"
    assert await ask(empty_url, rows_of_0001) == [SESSION, TURN, LATER]
    assert await migrate(empty_url) == HEAD


async def test_a_database_without_a_schema_is_refused_with_the_command_that_helps(empty_url: str) -> None:
    with pytest.raises(SchemaBehind, match="Run: turnkeep migrate"):
        async with open_store(empty_url):
            pass
    if empty_url.startswith("sqlite"):
        assert not os.path.exists(empty_url.removeprefix("sqlite:///"))  # noqa: ASYNC240 - one look, in a test


async def test_a_newer_database_is_refused_by_start_and_by_migrate(url: str) -> None:
    await ask(url, lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = 'f00d'")))
    try:
        for attempt in (migrate(url), open_store(url).__aenter__()):
            with pytest.raises(SchemaTooNew, match=r"schema f00d.*newer version"):
                await attempt
        database = connect(url)
        assert (await schema_state(database)).current == "f00d"
        await database.close()
    finally:
        await ask(
            url, lambda connection: connection.execute(text(f"UPDATE alembic_version SET version_num = '{HEAD}'"))
        )


async def test_two_at_once_migrate_once(empty_url: str) -> None:
    started = [await asyncio.create_subprocess_exec(*MIGRATE, empty_url, cwd=ROOT) for _ in range(2)]
    assert [await process.wait() for process in started] == [0, 0]
    assert await ask(empty_url, differences) == []


def test_killed_half_way_it_has_done_nothing_and_is_run_again(empty_url: str) -> None:
    killed = subprocess.run(
        [*MIGRATE, empty_url],
        cwd=ROOT,
        env={**os.environ, "TURNKEEP_FAILPOINT": "before_migrate_commit"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert asyncio.run(ask(empty_url, tables)) == set()
    assert asyncio.run(migrate(empty_url)) == HEAD
    assert asyncio.run(ask(empty_url, differences)) == []


@pytest.mark.parametrize("url_", ["mysql://h/d", "sqlite://", "sqlite:///:memory:"])
async def test_a_database_of_another_kind_is_refused(url_: str) -> None:
    with pytest.raises(ValueError, match="the store"):
        await migrate(url_)


async def test_the_database_file_is_its_owner_s_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "turnkeep.db"
    await migrate(f"sqlite:///{path}")
    assert path.stat().st_mode & 0o777 == 0o600
