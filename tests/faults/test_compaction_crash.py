"""kill -9, SIGTERM and a database that goes away in the midst of a compaction: old view or new one, never half."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.compacted import SLOW, Talk, place
from tests.faults.database import away
from tests.faults.processes import Supervised
from tests.gateway.talks import words

pytestmark = [pytest.mark.anyio, pytest.mark.prove]
POINTS = tuple(f"{when}_{what}_compaction_commit" for what in ("begin", "commit") for when in ("before", "after"))
SEED = 20_26


async def dies(gateway: Supervised, life: int) -> None:
    assert await gateway.dead(life), "it did not die"
    await gateway.ready()


async def until_unanswered(talk: Talk, gateway: Supervised, life: int) -> str:
    """Turns, until one gets no answer, or the gateway died after one was answered; what that one, or the next, says."""
    for _ in range(20):
        text, sent = words(talk.sent + 1), talk.sent
        if gateway.lives > life:
            return text
        try:
            await talk.turn(text)
        except httpx.TransportError:
            talk.sent = sent
            return text
        await asyncio.sleep(0.2)
    raise AssertionError("the gateway does not die")


async def again(talk: Talk, text: str, **more: Any) -> dict[str, Any]:
    """A turn, sent under its key until it is answered, as a client's library does."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        sent = talk.sent
        try:
            answer = await talk.post(text, **more)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code == 200 and answer.json()["status"] == "completed":
            talk.hear(text, answer.json())
            return dict(answer.json())
        if answer is not None and answer.status_code not in (200, 409, 500, 502, 503, 504):
            raise AssertionError(answer.text)
        talk.sent = sent
        await asyncio.sleep(0.1)
    raise AssertionError("a turn was not answered within 60 s")


async def test_a_gateway_that_dies_at_each_commit_of_a_compaction(tmp_path: Path, url: str) -> None:
    def environ(life: int) -> dict[str, str]:
        return {"TURNKEEP_FAILPOINT": POINTS[life - 1]} if life <= len(POINTS) else {}

    async with place(tmp_path, url, environ=environ) as here:
        gateway = here.gateways[0]
        for life, point in enumerate(POINTS, 1):
            talk = await Talk.begin(here.clients[0])
            text = await until_unanswered(talk, gateway, life)
            await dies(gateway, life)
            await here.ready()
            rows = await talk.rows()
            expected = {
                "before_begin_compaction_commit": [],
                "after_begin_compaction_commit": [("failed", "interrupted")],
                "before_commit_compaction_commit": [("failed", "interrupted")],
                "after_commit_compaction_commit": [("committed", None)],
            }[point]
            assert [(row["status"], (row["error"] or {}).get("code")) for row in rows] == expected, point
            if life < len(POINTS):
                await talk.patch(
                    policy={"mode": "manual", "max_output_tokens": 128}
                )  # the next point is another talk's
            began = time.monotonic()
            await again(talk, text)
            assert time.monotonic() - began < 10, "the session does not work at once"
            await talk.audit()
        await talk.until_committed()
        await talk.audit()


@pytest.mark.parametrize("phase", ["summary", "prefill"])
async def test_a_gateway_that_is_killed_while_an_engine_works_for_it(tmp_path: Path, url: str, phase: str) -> None:
    async with place(tmp_path, url, lease_s=30) as here:
        here.engine_told.say(summary=SLOW if phase == "summary" else {}, prefill={"delta_s": 3})
        talk = await Talk.begin(here.clients[0])
        await talk.until_compacting(here.engine_told, f"{phase} begins")
        here.gateways[0].kill()
        await dies(here.gateways[0], 1)
        here.calm()
        (row,) = await talk.rows()
        assert (row["status"], row["error"]["code"]) == ("failed", "interrupted")
        began = time.monotonic()
        await here.ready()
        await talk.turn("and on")
        assert time.monotonic() - began < 15, "the session does not work at once"
        await talk.until_committed()
        await talk.audit()


async def test_sigterm_ends_the_row_and_the_process_in_time(tmp_path: Path, url: str) -> None:
    async with place(tmp_path, url) as here:
        here.engine_told.say(summary={"then": "hang"})
        talk = await Talk.begin(here.clients[0])
        await talk.until_compacting(here.engine_told)
        began = time.monotonic()
        here.gateways[0].send(signal.SIGTERM)
        await dies(here.gateways[0], 1)
        assert here.gateways[0].codes[0] in (0, -signal.SIGTERM)
        assert time.monotonic() - began < 20
        (row,) = await talk.rows()
        assert (row["status"], row["error"]["code"]) == ("failed", "cancelled")
        assert row["report"]["tokens_before"] > 0
        here.calm()
        await here.ready()
        await talk.until_committed()
        await talk.audit()


async def test_an_engine_that_is_killed_while_it_writes_the_summary(tmp_path: Path) -> None:
    async with place(tmp_path, f"sqlite:///{tmp_path}/turnkeep.db") as here:
        here.engine_told.say(summary={"after": 3, "then": "die"})
        talk = await Talk.begin(here.clients[0])
        await talk.until_compacting(here.engine_told)
        assert await here.engine.dead(1)
        here.calm()
        (row,) = await talk.settled()
        assert row["status"] == "committed", row
        assert row["segments"][0]["source"] == "extracted"
        await here.ready()
        await talk.audit()


async def test_a_database_that_is_away_at_the_commit_gets_it_when_it_is_back(
    tmp_path: Path, url: str, request: pytest.FixtureRequest
) -> None:
    server = "" if url.startswith("sqlite") else request.getfixturevalue("postgres_server")
    async with place(tmp_path, url) as here:
        here.engine_told.say(prefill={"delta_s": 1})
        talk = await Talk.begin(here.clients[0])
        await talk.until_compacting(here.engine_told, "prefill begins")
        async with away(url, server):
            await here.engine_told.until("prefill ends")
            await asyncio.sleep(6 if url.startswith("sqlite") else 1)  # past SQLite's busy timeout
        (row,) = await talk.settled()
        assert row["status"] == "committed", (row["error"], row["report"])
        here.calm()
        await talk.audit()


@pytest.mark.parametrize("kills", [pytest.param(4, id="few"), pytest.param(40, id="many", marks=pytest.mark.prove)])
@pytest.mark.timeout(1800)
async def test_kills_at_any_moment_while_conversations_are_compacted(tmp_path: Path, url: str, kills: int) -> None:
    """Seeded; the gateway and the engine in turn."""
    dice = random.Random(SEED)
    async with place(tmp_path, url, lease_s=3) as here:
        here.engine_told.say(summary={"delta_s": 0.02}, prefill={"delta_s": 0.3})
        talks = [await Talk.begin(here.clients[0]) for _ in range(3)]
        over = asyncio.Event()

        async def converse(talk: Talk) -> None:
            while not over.is_set():
                await again(talk, words(talk.sent + 1, 600))

        async def kill() -> None:
            for number in range(kills):
                await asyncio.sleep(dice.uniform(0.5, 3.0))
                victim = (here.gateways[0], here.engine)[number % 2]
                life = victim.lives
                victim.kill()
                await dies(victim, life)
                await here.ready()
            await asyncio.sleep(3)
            over.set()

        killer = asyncio.create_task(kill())
        await asyncio.gather(killer, *(converse(talk) for talk in talks))
        here.calm()
        statuses = [row["status"] for talk in talks for row in await talk.audit()]
        assert statuses.count("committed") >= 3, statuses
