"""Whether compaction in the background waits, for what came of the session's last ones. Knows no store and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from compression.budget import breaker_open
from gateway.store.compaction_records import CompactionRecord

LOOKED_BACK = 8  # rows that decide it
Pause = Literal["vain", "reverted"]


def pause(rows: Sequence[CompactionRecord], *, prompt_tokens: int, reserve_tokens: int, window: int) -> Pause | None:
    """`rows`: the newest first. None: it need not wait.

    vain: the last ones brought nothing, and the conversation has grown little since. reverted: somebody took the last
    one back, and the prompt fits the window with the answer's reserve.
    """
    standing = next((row.status for row in rows if row.status in ("committed", "reverted")), None)
    if standing == "reverted" and prompt_tokens + reserve_tokens <= window:
        return "reverted"
    vain = 0
    for row in rows:
        if row.status not in ("failed", "skipped") or row.trigger == "manual":
            break
        vain += 1
    then = int(rows[0].report.get("tokens_before") or 0) if vain else 0
    return "vain" if breaker_open(vain, then, prompt_tokens, window) else None
