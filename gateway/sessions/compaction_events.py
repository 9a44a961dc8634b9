"""A session's compactions as events: one shape in a turn's stream and in the stream of compactions.

number 1        2        3 ...
started  1      4        7
ended    2      5        8          completed, failed or skipped
reverted 3      6        9
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from gateway.store.compaction_records import CompactionRecord

What = Literal["started", "completed", "failed", "skipped", "reverted"]
STEPS = 3  # sequence numbers for each compaction


def shown(record: CompactionRecord) -> dict[str, Any]:
    """A compaction without its view."""
    return {
        "id": record.id,
        "object": "compaction",
        "session_id": record.session_id,
        "number": record.number,
        "status": record.status,
        "trigger": record.trigger,
        "base_id": record.base_id,
        "head_turn_id": record.head_turn_id,
        "anchor_turn_id": record.anchor_turn_id,
        "plan": dict(record.plan),
        "report": dict(record.report),
        "error": record.error,
        "created_at": record.created_at,
        "completed_at": record.completed_at,
    }


def as_begun(record: CompactionRecord) -> CompactionRecord:
    """The row as it was when it began."""
    return replace(
        record,
        status="running",
        anchor_turn_id=None,
        anchor_seq=None,
        view=None,
        report={},
        error=None,
        completed_at=None,
    )


def events_of(record: CompactionRecord) -> Iterator[tuple[int, What, CompactionRecord]]:
    """What has come of it so far: sequence number, event, and the row as it was then."""
    first = STEPS * (record.number - 1) + 1
    if record.status == "skipped":
        yield first + 1, "skipped", record
        return
    yield first, "started", as_begun(record)
    if record.status == "failed":
        yield first + 1, "failed", record
    elif record.status != "running":
        yield first + 1, "completed", replace(record, status="committed")
    if record.status == "reverted":
        yield first + 2, "reverted", record
