"""Receipts of erasures, as plain values. Knows no SQL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ErasureScope = Literal["session", "expired", "user"]
ErasureStatus = Literal["erasing", "pending", "done"]
PlaceKind = Literal["replica", "engine", "memory", "database"]  # engine: ends with the gateway that runs it
PlaceState = Literal["answered", "cannot", "gone"]
DATABASE = "database"  # the place of old versions of rows: a write-ahead log, dead tuples
NOBODYS = ""  # the erasure of a forgetting that no receipt waits for
ARCHIVED = "archive"  # the same, of a session that is archived: it is dropped where the session is taken up again


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was erased and where: never a word of what it said.

    erasing    rows of the end user may be left; goes on after a restart
    pending    the rows are gone, some place has not said yet that it forgot
    done       every place has, or is gone
    """

    id: str
    scope: ErasureScope
    session_id: str | None  # of one session's
    subject: str | None  # of an end user's: a keyed digest of the name
    sessions: int
    status: ErasureStatus
    erased: Mapping[str, int]  # table -> rows
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # place -> state, and what it said
    at: float = 0.0  # seconds since 1970
    completed_at: float | None = None


@dataclass(frozen=True, slots=True)
class Forgetting:
    """A session that a place has still to forget."""

    tenant_id: str
    erasure_id: str
    session_id: str
    place: str
    tries: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where something of a session may be beside its rows. `gateway`: who alone reaches it; None: every gateway."""

    name: str
    kind: PlaceKind = "replica"
    gateway: str | None = None


@dataclass(frozen=True, slots=True)
class ReceiptPage:
    receipts: tuple[Receipt, ...]
    next_cursor: str | None
