"""Statements compiled once to the driver's own text, for the hot path.

SQLAlchemy spends 15 to 20 us a row on converting parameters; our columns are text, numbers and bytes, which both
drivers take as they are. So a statement is built with Core, compiled once a dialect, and run with plain tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import ClauseElement, Connection, Dialect, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import SQLCompiler

INSERT: Mapping[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}  # with ON CONFLICT
SIZES = (1, 4, 16, 64, 256)  # of an IN list; a shorter one is filled up by repeating its last value


def upserts(table: Table, changed: Callable[[Any], Mapping[str, Any]]) -> dict[str, ClauseElement]:
    """By dialect: a row, or where its key is there already what `changed` makes of the values that were to go in."""
    made = {name: insert(table) for name, insert in INSERT.items()}
    keys = list(table.primary_key)
    return {
        name: one.on_conflict_do_update(index_elements=keys, set_=changed(one.excluded)) for name, one in made.items()
    }


@dataclass(frozen=True, slots=True)
class _Compiled:
    text: str
    names: tuple[str, ...]  # of the parameters, by position
    fixed: Mapping[str, Any]  # values that stand in the statement itself

    def values(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        if self.fixed:
            row = {**self.fixed, **row}
        return tuple([row[name] for name in self.names])


@lru_cache(maxsize=512)
def _compiled(statement: ClauseElement, dialect: Dialect, columns: tuple[str, ...] | None) -> _Compiled:
    made = statement.compile(dialect=dialect, column_keys=columns)
    assert isinstance(made, SQLCompiler)
    names = tuple(made.positiontup or ())
    fixed = {name: made.binds[name].value for name in names if not made.binds[name].required}
    return _Compiled(str(made), names, fixed)


def run_many(connection: Connection, statement: ClauseElement, rows: Sequence[Mapping[str, Any]]) -> None:
    """An INSERT, UPDATE or DELETE for every row; all rows have the names of the first."""
    compiled = _compiled(statement, connection.dialect, tuple(rows[0]))
    connection.exec_driver_sql(compiled.text, [compiled.values(row) for row in rows])


def fetch_in(
    connection: Connection,
    build: Callable[[int], ClauseElement],
    parameters: Mapping[str, Any],
    **lists: Sequence[Any],
) -> Sequence[Any]:
    """Rows of `build(size)`, whose lists have the parameters <name>_0 ... <name>_<size - 1> for each of `lists`.

    `build` is cached: the same size gives the same statement. Lists longer than the largest size go in parts; where
    there are two, a pair stands at the same place in both.
    """
    longest = max(len(values) for values in lists.values())
    if longest > SIZES[-1]:
        parts = range(0, longest, SIZES[-1])
        cut = [{name: values[start : start + SIZES[-1]] for name, values in lists.items()} for start in parts]
        return [row for part in cut for row in fetch_in(connection, build, parameters, **part)]
    size = next(size for size in SIZES if size >= longest)
    row = dict(parameters)
    for name, values in lists.items():
        filled = [*values, *[values[-1]] * (size - len(values))]
        row.update((f"{name}_{place}", value) for place, value in enumerate(filled))
    compiled = _compiled(build(size), connection.dialect, None)
    return connection.exec_driver_sql(compiled.text, compiled.values(row)).all()
