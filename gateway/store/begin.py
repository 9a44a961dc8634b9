"""Whether a turn may begin: a plain decision over what the transaction has read. Knows no SQL and no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.store.leases import in_force
from gateway.store.records import HEAD, BeginTurn, Busy, HeadMoved, NoSession


@dataclass(slots=True)
class LiveSession:
    """What a batch knows and changes of a session row that it has locked."""

    tenant_id: str
    id: str
    head: str | None
    next_seq: int
    fence: int
    owner: str | None
    lease_until: float | None
    running: str | None
    cancel: int
    user_ref: str | None
    origin: str
    expires_at: float | None
    version: int
    view_version: int = 0
    bytes: int = 0
    new: dict[str, Any] | None = None  # the row to insert; None: it exists
    dirty: bool = False

    def over(self, now: float) -> bool:
        """Whether its time is over: it is gone then, swept or not. A running turn is let end."""
        leased = self.running is not None and in_force(self.lease_until, now)
        return self.expires_at is not None and self.expires_at <= now and not leased


@dataclass(slots=True)
class LiveTurn:
    """What a batch knows of a turn that an idempotency key names."""

    id: str
    parent_id: str | None
    seq: int
    status: str
    attempt: int
    request_hash: bytes | None
    finish_reason: str | None
    built_on: bool  # a turn goes on from it, or a compaction was made of a path that ends in it


@dataclass(frozen=True, slots=True)
class Seen:
    """The key's turn runs, or was answered."""

    turn: LiveTurn
    same_request: bool


@dataclass(frozen=True, slots=True)
class Reopen:
    turn: LiveTurn


@dataclass(frozen=True, slots=True)
class Admit:
    """A new turn below `parent_id`. `rekey`: a turn that never was answered gives up the idempotency key for it: the
    conversation went on elsewhere, or from it, and what others build on stays as they saw it."""

    parent_id: str | None
    rekey: LiveTurn | None = None


Decision = NoSession | Seen | Busy | HeadMoved | Reopen | Admit


def unanswered(turn: LiveTurn) -> bool:
    """Whether nothing that a client could hold for an answer was stored: `failed`, or cut off without a reason to stop.

    An incomplete turn with a finish reason (length, cancelled, content_filter) is an answer.
    """
    return turn.status == "failed" or (turn.status == "incomplete" and turn.finish_reason is None)


def decide_begin(begin: BeginTurn, session: LiveSession | None, known: LiveTurn | None, now: float) -> Decision:
    """`session` None: absent; a lease that ran out was ended before. `known`: the turn that holds the key."""
    if known is not None and not (known.request_hash == begin.request_hash and unanswered(known)):
        return Seen(known, known.request_hash == begin.request_hash)
    if session is None:
        if begin.create is None:
            return NoSession()
        head = None
    elif session.running is not None:
        return Busy(session.running, max(0.0, (session.lease_until or now) - now))
    else:
        head = session.head
    if session is not None and begin.expected_version not in (None, session.version):
        return HeadMoved(head)  # the prompt was built before a PATCH
    if session is not None and begin.expected_view not in (None, session.view_version):
        return HeadMoved(head)  # it was built through another view
    on_head = begin.parent == HEAD
    built_on = begin.expected_head if on_head else begin.parent
    overtaken = known is not None and on_head and head not in (known.parent_id, known.id)
    if known is not None and not overtaken:
        if built_on != known.parent_id:
            return HeadMoved(known.parent_id)
        return Admit(known.parent_id, rekey=known) if known.built_on else Reopen(known)
    if on_head and built_on != head:
        return HeadMoved(head)
    return Admit(built_on, rekey=known)
