"""Two gateways on one database turn, pin, compact and revert one session at once: nobody hears of a mistake of ours."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.live import Live, live_gateway
from tests.gateway.store.conftest import empty_url, postgres_server
from tests.gateway.talks import context, noted, settled, summarising, talk, words

__all__ = ["empty_url", "postgres_server"]
pytestmark = [pytest.mark.anyio, pytest.mark.prove]
POLICY = {"max_output_tokens": 64, "tokens_per_turn": 100}
ROUNDS = 12
EXPECTED = {200, 409}  # done, or another was there first
NO_ROOM = {
    "running",
    "changed",
    "superseded",
    "view_moved",
    "floor",
    "gain",
    "nothing",
}  # of a turn: docs/compaction.md


async def _one(live: Live, session: str, chance: random.Random, number: int) -> tuple[str, int, Any]:
    """One request of a client that knows nothing of the others."""
    path = f"/v1/sessions/{session}"
    what = chance.choice(["turn", "turn", "compact", "compact", "pin", "unpin", "revert", "plan"])
    if what == "turn":
        answer = await live.turn(session, words(number, chance.choice([300, 660, 1500])))
    elif what == "compact":
        answer = await live.client.post(f"{path}/compact", json={"strategy": chance.choice(["extract", "trim"])})
    elif what == "plan":
        answer = await live.client.post(f"{path}/compact", json={"dry_run": True})
    elif what == "revert":
        rows = (await live.client.get(f"{path}/compactions")).json()["data"]
        if not rows:
            return what, 200, None
        answer = await live.client.post(f"{path}/compactions/{rows[0]['id']}/revert")
    else:
        method = "PUT" if what == "pin" else "DELETE"
        answer = await live.client.request(method, f"{path}/turns/{chance.randint(1, 8)}/pin")
    return what, answer.status_code, answer.json()


async def test_both_at_once_leave_one_valid_history(tmp_path: Path, empty_url: str) -> None:
    chance = random.Random(11)
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(
                live_gateway(
                    tmp_path, {"echo": summarising(noted)}, database_url=empty_url, gateway_name=name, handover_s=0
                )
            )
            for name in ("one", "two")
        ]
        session = await gateways[0].session(system="Be brief.", policy=POLICY)
        await talk(gateways[0], session, 8)
        told: Counter[tuple[str, int]] = Counter()
        for number in range(ROUNDS):
            asked = [_one(live, session, chance, 9 + number) for live in gateways for _ in range(2)]
            for what, status, answer in await asyncio.gather(*asked):
                told[what, status] += 1
                if (what, status) == ("turn", 400):
                    assert answer["error"]["code"] == "context_length_exceeded"
                    assert answer["error"]["details"]["compaction"]["reason"] in NO_ROOM, answer
                    continue
                assert status in EXPECTED, (what, status, answer)
        for live in gateways:
            rows = await settled(live, session)
            assert all(row["error"] for row in rows if row["status"] == "failed")
        first, second = [await context(live, session) for live in gateways]
        assert first["messages"] == second["messages"]
        turns = await gateways[1].turns(session)
        assert [turn["status"] for turn in turns] == ["completed"] * (8 + told["turn", 200])
        shown = await context(gateways[0], session, "and now?")
        following = (await gateways[1].turn(session, "and now?")).json()
        assert following["status"] == "completed"
        assert following["usage"]["prompt_tokens"] == shown["prompt_tokens"]
        assert told["compact", 200] > 0
