"""Reads of the usage ledger: sums by group, a page at a time. Functions of a connection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, func, select, tuple_

from gateway.store.rows import storable
from gateway.store.tables import usage
from gateway.store.usage_records import CLIENTS, NAMES, Amount, UsageLine, UsagePage, UsageQuery

COLUMNS: Mapping[str, Column[Any]] = {
    "tenant": usage.c.tenant_id,
    "day": usage.c.day,
    "model": usage.c.model,
    "key": usage.c.key_id,
    "user": usage.c.user_ref,
    "session": usage.c.session_id,
}
assert tuple(COLUMNS) == NAMES
_SUMS = tuple(func.sum(usage.c[name]) for name in ("count", "prompt_tokens", "cached_tokens", "output_tokens"))


def report(connection: Connection, query: UsageQuery) -> UsagePage:
    """Groups in order, `query.limit` at most. Raises ValueError."""
    groups = _columns(query.group_by)
    which = _which(query)
    after = [_beyond(groups, query.after)] if query.after is not None else []
    found = connection.execute(
        select(*groups).where(*which, *after).group_by(*groups).order_by(*groups).limit(query.limit + 1)
    ).all()
    page = [tuple(row) for row in found[: query.limit]]
    if not page:
        return UsagePage((), more=False)
    place = tuple_(*groups)
    between = (place >= _values(groups, page[0]), place <= _values(groups, page[-1]))
    split = (usage.c.model, usage.c.kind)
    sums = connection.execute(select(*groups, *split, *_SUMS).where(*which, *between).group_by(*groups, *split))
    amounts: dict[tuple[Any, ...], dict[tuple[str, str], Amount]] = defaultdict(dict)
    for row in sums:
        at = len(groups)
        amounts[tuple(row[:at])][row[at], row[at + 1]] = Amount(*(int(number) for number in row[at + 2 :]))
    lines = tuple(UsageLine(group, amounts[group]) for group in page)
    return UsagePage(lines, more=len(found) > query.limit)


def tokens_since(connection: Connection, tenant_id: str, key_id: str | None, since: int) -> int:
    mine = [usage.c.tenant_id == tenant_id, usage.c.day >= since, usage.c.kind.in_(CLIENTS)]
    if key_id is not None:
        mine.append(usage.c.key_id == key_id)
    total = select(func.coalesce(func.sum(usage.c.prompt_tokens + usage.c.output_tokens), 0)).where(*mine)
    return int(connection.execute(total).scalar_one())


def _columns(names: tuple[str, ...]) -> list[Column[Any]]:
    if unknown := [name for name in names if name not in COLUMNS]:
        raise ValueError(f"usage is not grouped by {unknown[0][:64]!r}; it is by {', '.join(NAMES)}")
    if not names or len(set(names)) < len(names):
        raise ValueError("usage is grouped by one or more names, each once")
    return [COLUMNS[name] for name in names]


def _which(query: UsageQuery) -> list[ColumnElement[bool]]:
    which: list[ColumnElement[bool]] = [usage.c.day >= query.since, usage.c.day < query.until]
    if query.tenant_id is not None:
        storable(query.tenant_id)
        which.append(usage.c.tenant_id == query.tenant_id)
    for name, value in query.where.items():
        storable(value)
        which.append(COLUMNS[name] == value)
    return which


def _beyond(groups: list[Column[Any]], after: tuple[str | int, ...]) -> ColumnElement[bool]:
    if len(after) != len(groups):
        raise ValueError("this cursor is of another grouping")
    for column, value in zip(groups, after, strict=True):
        wanted = int if column is usage.c.day else str
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ValueError("this cursor is of another grouping")
        if isinstance(value, str):
            storable(value)
    beyond: ColumnElement[bool] = tuple_(*groups) > _values(groups, after)
    return beyond


def _values(groups: list[Column[Any]], values: tuple[Any, ...]) -> Any:
    return tuple_(*values, types=[column.type for column in groups])
