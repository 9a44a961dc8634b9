"""Replicas as they are stored, as plain values. Knows no SQL and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ReplicaState = Literal["active", "draining", "drained"]


@dataclass(frozen=True, slots=True)
class NewReplica:
    """`credential`: sealed. `terms`: what else was said of it, as JSON."""

    name: str
    url: str
    credential: bytes | None
    terms: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """`source` settings: the row holds only the state; the rest is in the settings of each gateway."""

    name: str
    source: Literal["settings", "api"]
    url: str | None
    credential: bytes | None
    terms: Mapping[str, Any]
    state: ReplicaState
    revision: int
    reason: str
    created_at: float  # seconds since 1970
    changed_at: float
    drain_until: float | None
    progress: Mapping[str, Any]  # of its drain: sessions_left, moved, ...


@dataclass(frozen=True, slots=True)
class PinnedSession:
    """A session whose head turn ran on a replica, or was moved there."""

    tenant_id: str
    session_id: str
    turn_id: str
    created_at: float  # of the session, seconds since 1970
    last_used_at: float
    turns: int
    path_tokens: int


class NoReplica(Exception):
    """It was added at runtime, and removed since."""


class ReplicaExists(Exception):
    """There is one of that name, or at that URL."""


class TooManyReplicas(Exception):
    """`added` at runtime already, of `limit`."""

    def __init__(self, added: int, limit: int) -> None:
        super().__init__(f"{added} replicas were added at runtime already; at most {limit} may be")
        self.added, self.limit = added, limit
