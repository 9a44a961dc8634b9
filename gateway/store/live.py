"""What a round of turns reads, and locks, before it decides."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection

from gateway.store import statements as sql
from gateway.store.begin import LiveSession, LiveTurn
from gateway.store.prepared import fetch_in

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
        for row in fetch_in(connection, sql.lock_sessions, {"b_tenant": tenant_id}, id=sorted(ids)):
            found[tenant_id, row[0]] = LiveSession(tenant_id, *row)
    return found


def turns_by_key(connection: Connection, keys: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], LiveTurn]:
    """Tenant, session and idempotency key -> the turn that holds the key."""
    found = {}
    for tenant_id, pairs in _grouped((key[0], key[1:]) for key in keys).items():
        sessions, used = zip(*sorted(pairs), strict=True)
        for row in fetch_in(connection, sql.turns_by_key, {"b_tenant": tenant_id}, session=sessions, key=used):
            found[tenant_id, row[0], row[1]] = LiveTurn(*row[2:])
    return found


def places(connection: Connection, keys: Iterable[Key]) -> dict[Key, Place]:
    found = {}
    for tenant_id, ids in _grouped(keys).items():
        for row in fetch_in(connection, sql.places, {"b_tenant": tenant_id}, id=sorted(ids)):
            found[tenant_id, row[0]] = Place(*row[1:])
    return found


T = TypeVar("T")


def _grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, set[T]]:
    groups: dict[str, set[T]] = defaultdict(set)
    for tenant_id, value in pairs:
        groups[tenant_id].add(value)
    return groups
