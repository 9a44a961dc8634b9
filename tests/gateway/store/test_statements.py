"""The statements of the hot path find their rows by key, however many rows there are."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import ClauseElement, Connection, create_engine, event
from sqlalchemy.dialects import sqlite

from gateway.store import statements as sql
from gateway.store import sweep, views
from gateway.store.prepared import SIZES

BY_KEY = [
    *(
        (f"{build.__name__}({size})", build(size))
        for build in (sql.lock_sessions, sql.places, sql.turns_by_key)
        for size in SIZES
    ),
    *((name, getattr(views, name)) for name in ("_VERSION", "_PINNED", "_LOWEST", "_AT")),
    *((f"statement {place}", statement) for place, statement in enumerate(sql.ORDER) if not statement.is_insert),  # type: ignore[attr-defined]
]


@pytest.fixture(scope="module")
def connection(migrated_sqlite: Path) -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(migrated_sqlite)
    yield opened
    opened.close()


@pytest.mark.parametrize(("name", "statement"), BY_KEY, ids=[name for name, _ in BY_KEY])
def test_every_table_is_searched_by_tenant_and_key(
    connection: sqlite3.Connection, name: str, statement: ClauseElement
) -> None:
    compiled = statement.compile(dialect=sqlite.dialect())
    plan = connection.execute(f"EXPLAIN QUERY PLAN {compiled}", [None] * len(compiled.positiontup or ()))  # type: ignore[attr-defined]
    steps = [row[3] for row in plan]
    assert not [step for step in steps if step.startswith("SCAN")]
    searches = [step for step in steps if step.startswith("SEARCH")]
    assert searches
    assert all("(tenant_id=? AND " in step for step in searches), searches


SWEEPS: list[tuple[Callable[[Connection], object], str]] = [
    (lambda connection: sweep.lapse_leases(connection, 9.0), "ix_sessions_running"),
    (lambda connection: sweep.lapse_compactions(connection, 9.0), "ix_compactions_running"),
    (lambda connection: sweep.erase_expired(connection, 10, 9.0), "ix_sessions_expiring"),
    (lambda connection: sweep.purge_events(connection, 9.0), "ix_events_created_at"),
    (lambda connection: sweep.forget_keys(connection, 9.0), "ix_turns_keyed"),
]


@pytest.mark.parametrize(("run", "index"), SWEEPS, ids=[index for _, index in SWEEPS])
def test_a_sweep_reads_only_what_may_be_due(
    migrated_sqlite: Path, run: Callable[[Connection], object], index: str
) -> None:
    """Each looks through an index that holds nothing else, not through every session or turn every 15 s."""
    engine, steps = create_engine(f"sqlite:///{migrated_sqlite}"), []

    @event.listens_for(engine, "before_cursor_execute")
    def explain(_connection: Connection, cursor: sqlite3.Cursor, text: str, values: object, *_: object) -> None:
        plan = cursor.connection.execute(f"EXPLAIN QUERY PLAN {text}", values)  # type: ignore[arg-type]
        steps.extend(row[3] for row in plan)

    with engine.connect() as connection:
        run(connection)
    engine.dispose()
    (step,) = steps
    assert re.fullmatch(rf"(SEARCH|SCAN) \w+ USING (COVERING )?INDEX {index}( .*)?", step)


def test_the_walk_to_a_view_goes_by_key(connection: sqlite3.Connection) -> None:
    compiled = views._FIRST_ANCHOR.compile(dialect=sqlite.dialect())
    plan = connection.execute(f"EXPLAIN QUERY PLAN {compiled}", [None] * len(compiled.positiontup))
    looked = [row[3] for row in plan if "SEARCH" in row[3] or "SCAN" in row[3]]
    assert {step for step in looked if step.startswith("SCAN")} == {"SCAN walk"}
    searches = [step for step in looked if step.startswith("SEARCH")]
    assert len(searches) == 4
    assert all("(tenant_id=? AND id=?)" in step or "AND anchor_seq=?)" in step for step in searches), searches
