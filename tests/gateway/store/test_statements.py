"""The statements of the hot path find their rows by key, however many rows there are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import ClauseElement
from sqlalchemy.dialects import sqlite

from gateway.store import statements as sql
from gateway.store.prepared import SIZES

BY_KEY = [
    *(
        (f"{build.__name__}({size})", build(size))
        for build in (sql.lock_sessions, sql.places, sql.turns_by_key)
        for size in SIZES
    ),
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
