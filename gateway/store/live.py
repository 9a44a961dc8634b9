"""What a round of turns reads, and locks, before it decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection

from gateway.store import statements as sql
from gateway.store.begin import LiveSession, LiveTurn

Key = tuple[str, str]  # tenant and session, or tenant and turn


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn is: in which session, under which fence, at which attempt."""

    session_id: str
    seq: int
    fence: int
    attempt: int
    status: str


def lock_sessions(connection: Connection, keys: Iterable[Key]) -> dict[Key, LiveSession]:
    """The sessions that exist, locked until the transaction ends, in the same order in every gateway."""
    found = {}
    for tenant_id, ids in sorted(_grouped(keys).items()):
        rows: Iterable[Any] = connection.execute(sql.LOCK_SESSIONS, {"b_tenant": tenant_id, "b_ids": sorted(ids)})
        for row in rows:
            found[tenant_id, row.id] = LiveSession(tenant_id, *row)  # the columns stand in the fields' order
    return found


def turns_by_key(connection: Connection, keys: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], LiveTurn]:
    """Tenant, session and idempotency key -> the turn that holds the key."""
    wanted, found = set(keys), {}
    for tenant_id, pairs in _grouped((key[0], key[1:]) for key in wanted).items():
        within = {"b_sessions": [pair[0] for pair in pairs], "b_keys": [pair[1] for pair in pairs]}
        for session_id, idempotency_key, *row in connection.execute(
            sql.TURNS_BY_KEY, {"b_tenant": tenant_id, **within}
        ):
            found[tenant_id, session_id, idempotency_key] = LiveTurn(*row)
    return found


def places(connection: Connection, keys: Iterable[Key]) -> dict[Key, Place]:
    found = {}
    for tenant_id, ids in _grouped(keys).items():
        for row in connection.execute(sql.PLACES, {"b_tenant": tenant_id, "b_ids": sorted(ids)}):
            found[tenant_id, row.id] = Place(*row[1:])
    return found


T = TypeVar("T")


def _grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, set[T]]:
    groups: dict[str, set[T]] = defaultdict(set)
    for tenant_id, value in pairs:
        groups[tenant_id].add(value)
    return groups
