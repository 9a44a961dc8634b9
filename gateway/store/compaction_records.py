"""What the store takes and gives of compactions, as plain values. Knows no SQL and no clock.

    begin_compaction    one at a time in a session, on the view that stands       -> running
    renew_compaction    it is still at work: its deadline is put off              -> running
    commit_compaction   where that view still stands: the session's view_version + 1  -> committed
    end_compaction      otherwise                                                 -> failed | skipped
    revert_compaction   the view before it stands again: view_version + 1         -> reverted

None of them takes a turn's lease, or asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

CompactionStatus = Literal["running", "committed", "failed", "skipped", "reverted"]
Trigger = Literal["background", "foreground", "manual"]
INTERRUPTED = "interrupted"  # error code of one whose gateway died, or that outlasted its deadline
SUPERSEDED = "superseded"  # of one that another gateway ended, whose turn could not wait for it


@dataclass(frozen=True, slots=True)
class NewCompaction:
    """`base_id`: the compaction whose view it builds on, None for the raw path; `head_turn_id`: the snapshot's head."""

    tenant_id: str
    session_id: str
    id: str
    base_id: str | None
    trigger: Trigger
    head_turn_id: str
    plan: Mapping[str, Any]
    owner: str  # "<gateway name>/<boot epoch>"
    deadline_s: float  # from now; past it, it counts as interrupted for whoever comes by
    view_version: int  # the session's, read before or with the view that `plan` was made on
    supersedes: bool = False  # it ends the one that runs, whoever runs it


@dataclass(frozen=True, slots=True)
class CompactionRecord:
    tenant_id: str
    session_id: str
    id: str
    number: int  # from 1 in each session, in the order in which they began
    base_id: str | None
    status: CompactionStatus
    trigger: Trigger
    head_turn_id: str
    anchor_turn_id: str | None  # the latest turn that the view touches; None until it is committed
    anchor_seq: int | None  # that turn's
    plan: Mapping[str, Any]
    view: Mapping[str, Any] | None  # None unless it was ever committed
    report: Mapping[str, Any]
    error: Mapping[str, Any] | None
    owner: str
    created_at: float  # seconds since 1970
    deadline_at: float
    completed_at: float | None


@dataclass(frozen=True, slots=True)
class StandingView:
    """What stands on a path. `compaction` None: the raw turns. All three are of one instant."""

    compaction: CompactionRecord | None
    pinned: frozenset[str]  # ids of turns, of the whole session
    view_version: int = 0


class ViewMoved(Exception):
    """The view that the compaction was built on no longer stands."""

    def __init__(self, current: int) -> None:
        super().__init__(f"the session's view is at version {current}")
        self.current = current


class CompactionRunning(Exception):
    """Another compaction of this session runs. `until`: its deadline, seconds since 1970."""

    def __init__(self, id: str, until: float) -> None:
        super().__init__(f"compaction {id} runs in this session")
        self.id = id
        self.until = until


class CompactionOver(Exception):
    """The compaction ended before it could be committed. `status` None: it is gone, with its session."""

    def __init__(self, id: str, status: CompactionStatus | None) -> None:
        super().__init__(f"compaction {id} is {status or 'gone'}")
        self.status = status
