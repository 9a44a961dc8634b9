"""What goes into the store and comes out of it, as plain values. Knows no SQL and no clock.

A turn costs two durable writes:

    begin_turn   takes the lease (fencing token), checks the head, stores the input items        -> Begun | ...
    finish_turn  stores the answer, moves the head, ends the lease; refused when the fence moved
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compression.conversation import Item, Turn, TurnStatus
from gateway.store.compaction_records import CompactionOver as CompactionOver
from gateway.store.compaction_records import CompactionRecord as CompactionRecord
from gateway.store.compaction_records import CompactionRunning as CompactionRunning
from gateway.store.compaction_records import NewCompaction as NewCompaction
from gateway.store.compaction_records import StandingView as StandingView
from gateway.store.compaction_records import ViewMoved as ViewMoved
from gateway.store.erasure_records import Receipt as Receipt
from gateway.store.key_records import KeyRecord as KeyRecord
from gateway.store.limit_records import Bound
from gateway.store.limit_records import TooManySessions as TooManySessions
from gateway.store.usage_records import Spender

# Who made a session: the session API (conversations too), a session key, history matching, a response of its own.
Origin = Literal["api", "chat", "matched", "responses"]
# a setting can make none that is longer: a lease that ends later was given before the clock stepped back
LONGEST_LEASE_S = 120.0
HEAD = "head"  # BeginTurn.parent: go on from wherever the session's head stands


@dataclass(frozen=True, slots=True)
class SessionRecord:
    id: str
    tenant_id: str
    version: int  # grows with every PATCH; the ETag
    model: str
    system: str | None
    tools: tuple[Mapping[str, Any], ...]
    title: str | None
    user_ref: str | None
    metadata: Mapping[str, str]
    policy: Mapping[str, Any]
    origin: Origin
    head_turn_id: str | None
    next_seq: int
    status: Literal["idle", "running"]
    created_at: float  # seconds since 1970
    updated_at: float
    expires_at: float | None
    archived_at: float | None = None
    view_version: int = 0  # grows with every compaction that is committed or reverted, and with every pin


@dataclass(frozen=True, slots=True)
class NewSession:
    id: str
    tenant_id: str
    model: str
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    title: str | None = None
    user_ref: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin = "api"
    expires_at: float | None = None
    key_id: str = ""  # of the API key that makes it
    bounds: tuple[Bound, ...] = ()  # that it must fit: how many sessions its tenant, and its key, may have


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The token ids of a turn, a copy derived for one fingerprint (tokenizer, template, tools, model revision).

        parent's path        [0 ........ base_tokens ........ parent.path_tokens)
        this turn's path     [0 ........ base_tokens) prompt_ids output_ids

    Usually base_tokens is all of the parent's path. Where the history had to be rendered anew (another model, an
    edited system prompt, a template that rewrites old turns) it is the common prefix, and the rest is in prompt_ids.
    """

    fingerprint: str
    base_tokens: int
    prompt_ids: bytes  # u32 little-endian; the turn's input with the template's text around it, as kept
    output_ids: bytes  # every generated id
    path_tokens: int  # of the whole path, output_ids included
    path_digest: bytes  # chain_digest over the path as it went to the engine, end of output_ids
    open_answer: bool = False  # output_ids do not end with an end-of-turn id (length, cancel)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    turn: Turn
    tenant_id: str
    session_id: str
    model: str
    fence: int
    idempotency_key: str | None
    request_hash: bytes | None
    on_disconnect: Literal["cancel", "finish"]
    created_at: float
    completed_at: float | None
    finish_reason: str | None
    tokens: TurnTokens | None
    meaning: bytes | None  # digest of the path's meaning up to the end of this turn, for history matching
    usage: Mapping[str, Any]  # prompt_tokens, output_tokens, cached_tokens
    placement: Mapping[str, Any]  # replica, reason, expected_cached_tokens
    prefix_report: Mapping[str, Any]
    error: Mapping[str, Any] | None
    metadata: Mapping[str, Any]  # mode, settings of the request that shape the answer
    pinned: bool = False  # sent as it is, whatever a compaction does with the turns around it
    attempt: int = 1  # grows when the turn runs again from its start; not when another gateway goes on with it


@dataclass(frozen=True, slots=True)
class BeginTurn:
    tenant_id: str
    session_id: str
    turn_id: str
    owner: str  # "<gateway name>/<boot epoch>"
    lease_s: float
    input: tuple[Item, ...]
    model: str
    parent: str | None = HEAD  # HEAD, a turn id (branch), or None (a new root)
    expected_head: str | None = None  # the head that the prompt was built on; checked when parent is HEAD
    expected_version: int | None = None  # the session version it was built on; HeadMoved when a PATCH changed it
    expected_view: int | None = None  # the view_version it was built through; HeadMoved when that has changed
    idempotency_key: str | None = None
    request_hash: bytes | None = None
    on_disconnect: Literal["cancel", "finish"] = "finish"
    create: NewSession | None = None  # made in the same transaction when the session does not exist
    user_ref: str | None = None  # a session that is nobody's becomes this end user's
    move_head: bool = True  # whether finish_turn makes this turn the head
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what is told of it while it runs
    key_id: str = ""  # of the API key that asks


@dataclass(frozen=True, slots=True)
class Begun:
    seq: int
    fence: int
    parent_id: str | None
    reopened: bool = False  # an incomplete or failed turn under the same idempotency key runs again, with its own id
    turn_id: str = ""
    made: bool = False  # the session was made with this turn


@dataclass(frozen=True, slots=True)
class Busy:
    turn_id: str | None
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class HeadMoved:
    head_turn_id: str | None


@dataclass(frozen=True, slots=True)
class Known:
    """The idempotency key was used. `same_request` False: with another body."""

    turn: TurnRecord
    same_request: bool


@dataclass(frozen=True, slots=True)
class NoSession:
    pass


BeginOutcome = Begun | Busy | HeadMoved | Known | NoSession


@dataclass(frozen=True, slots=True)
class FinishTurn:
    tenant_id: str
    session_id: str
    turn_id: str
    fence: int
    status: TurnStatus  # completed, incomplete or failed
    output: tuple[Item, ...]
    finish_reason: str | None
    tokens: TurnTokens | None
    meaning: bytes | None
    usage: Mapping[str, Any]
    placement: Mapping[str, Any]
    prefix_report: Mapping[str, Any]
    error: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    move_head: bool = True
    spender: Spender | None = None  # who the usage is booked on; None: nobody, as for a turn that is imported


@dataclass(frozen=True, slots=True)
class SessionChanges:
    """A PATCH: what is named in `set` becomes so; the rest stays."""

    set: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SessionFilter:
    user_ref: str | None = None
    status: str | None = None
    created_after: float | None = None
    created_before: float | None = None
    updated_after: float | None = None
    updated_before: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    query: str | None = None  # in the title or the id
    include_archived: bool = False


@dataclass(frozen=True, slots=True)
class SessionPage:
    sessions: tuple[SessionRecord, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """Names a turn whose lease is, or was, held."""

    tenant_id: str
    session_id: str
    turn_id: str


@dataclass(frozen=True, slots=True)
class Overview:
    """How much the store holds."""

    tenants: int
    sessions: int  # archived ones included
    running: int
    turns: Mapping[str, int]  # by status
    keys: int


class DuplicateId(Exception):
    """A session, turn or key of this tenant has that id already."""


class UnknownTurn(Exception):
    """BeginTurn.parent names no turn of the session."""


class UnstorableText(ValueError):
    """Text that a database cannot keep as it is: NUL, or half of a surrogate pair."""


class VersionConflict(Exception):
    def __init__(self, current: int) -> None:
        super().__init__(f"the session is at version {current}")
        self.current = current


class SessionRuns(Exception):
    """A turn of the session runs: it cannot be archived now."""

    def __init__(self, turn_id: str) -> None:
        super().__init__(f"turn {turn_id} runs")
        self.turn_id = turn_id


class LeaseLost(Exception):
    """The fence moved: another holder took the session, so this write was refused."""


class StoreUnavailable(Exception):
    """The database could not take the write or answer in time; nothing of it was kept."""
