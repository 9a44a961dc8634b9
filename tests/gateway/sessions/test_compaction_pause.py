"""When compaction in the background waits: after runs in vain, and after a revert."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.sessions.compaction_pause import pause
from gateway.store.compaction_records import CompactionRecord, CompactionStatus, Trigger
from tests.gateway.live import Live, live_gateway
from tests.gateway.talks import WINDOW, compactions, settled, summarising, talk

EXTRACT = {"policy": {"strategy": "extract", "max_output_tokens": 64, "tokens_per_turn": 100}}


def row(status: CompactionStatus, before: int = 5000, trigger: Trigger = "background") -> CompactionRecord:
    nothing: dict[str, Any] = {"base_id": None, "anchor_turn_id": None, "anchor_seq": None, "view": None, "error": None}
    instants: dict[str, Any] = {"created_at": 0.0, "deadline_at": 0.0, "completed_at": None}
    return CompactionRecord(
        "default",
        "s",
        "c",
        1,
        status=status,
        trigger=trigger,
        head_turn_id="t",
        plan={},
        report={"tokens_before": before},
        owner="g/1",
        **nothing,
        **instants,
    )


def waits(*rows: CompactionRecord, tokens: int = 5100) -> str | None:
    return pause(rows, prompt_tokens=tokens, reserve_tokens=512, window=8192)


def test_after_three_in_vain_it_waits_for_a_twentieth_of_the_window() -> None:
    vain = [row("skipped"), row("failed"), row("skipped")]
    assert waits(*vain) == "vain"
    assert waits(*vain, tokens=5000 + 410) is None
    assert waits(*vain[:2], row("committed"), row("skipped")) is None
    assert waits(*vain[:2], row("failed", trigger="manual")) is None


def test_after_a_revert_it_waits_until_the_prompt_would_not_fit_with_its_reserve() -> None:
    assert waits() is None
    assert waits(row("reverted"), row("committed")) == "reverted"
    assert waits(row("skipped"), row("reverted")) == "reverted"
    assert waits(row("committed"), row("reverted")) is None
    assert waits(row("reverted"), tokens=8192 - 512) == "reverted"
    assert waits(row("reverted"), tokens=8192 - 511) is None


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    async with live_gateway(tmp_path, {"echo": summarising("")}) as running:
        yield running


@pytest.mark.anyio
async def test_an_undo_is_not_undone_by_the_next_turn(live: Live) -> None:
    session = await live.session(**EXTRACT)
    await talk(live, session, 8)
    (made,) = await settled(live, session)
    await live.client.post(f"/v1/sessions/{session}/compactions/{made['id']}/revert")
    turn = 9
    while len(await settled(live, session)) == 1:
        await talk(live, session, 1, first=turn)
        turn += 1
    rows = await compactions(live, session)
    assert [row["status"] for row in rows] == ["committed", "reverted"]
    assert rows[0]["report"]["tokens_before"] > WINDOW - 1000, "the next turn undid it"
