"""Two gateways on one database compact the same session: one view stands, and each row says what became of it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.faults.compacted import SLOW, Place, Talk, place
from tests.gateway.talks import words

pytestmark = [pytest.mark.anyio, pytest.mark.prove]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """For the whole module: its processes are started once for each database."""
    return "asyncio", {"use_uvloop": False}


@pytest.fixture(scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory, shared_url: str) -> AsyncIterator[Place]:
    async with place(tmp_path_factory.mktemp("two"), shared_url, gateways=2, summary_timeout_s=20) as here:
        yield here


@pytest.fixture
async def here(processes: Place) -> AsyncIterator[Place]:
    yield processes
    for gateway in processes.gateways:
        gateway.send(signal.SIGCONT)
    processes.calm()
    await processes.ready()


def at(here: Place, talk: Talk, gateway: int) -> Talk:
    """The same conversation through another gateway."""
    return Talk(here.clients[gateway], talk.id, talk.heard, talk.sent + 1000 * gateway)


async def test_asked_for_at_both_at_once_one_view_is_committed(here: Place) -> None:
    here.engine_told.say(summary={"delta_s": 0.01})
    talk = await Talk.begin(here.clients[0], mode="manual")
    told: Counter[str] = Counter()
    for _ in range(4):
        await talk.fill(5)
        before = len(await talk.rows())
        both: list[dict[str, Any]] = await asyncio.gather(*(at(here, talk, number).compact() for number in (0, 1)))
        told.update(str(one.get("reason") or one["status"]) for one in both)
        made = (await talk.settled())[: len(await talk.rows()) - before]
        assert Counter(row["status"] for row in made)["committed"] == 1, both
        assert all(row["error"] for row in made if row["status"] != "committed")
    assert told["committed"] == 4
    assert told["running"] + told["changed"] > 0, told
    await talk.audit()
    await at(here, talk, 1).audit()


async def test_turns_through_both_in_turn_are_compacted_by_whoever_comes(here: Place) -> None:
    talk = await Talk.begin(here.clients[0])
    for number in range(24):
        one = at(here, talk, number % 2)
        one.sent = talk.sent
        await one.turn(words(number + 1, 500))
        talk.sent += 1
    rows = await talk.audit()
    assert [row["status"] for row in rows].count("committed") >= 2
    await at(here, talk, 1).audit()


async def test_a_turn_that_needs_room_takes_the_place_of_the_other_gateways_run(here: Place) -> None:
    here.engine_told.say(summary=SLOW)
    talk = await Talk.begin(here.clients[0])
    await talk.until_compacting(here.engine_told)
    began = time.monotonic()
    turn = await at(here, talk, 1).turn(words(99, 3000))
    assert time.monotonic() - began < 1.5, "it waited for the other gateway's model"
    newest, first = await talk.settled()
    assert (newest["status"], newest["trigger"]) == ("committed", "foreground")
    assert turn["metadata"]["compaction"]["id"] == newest["id"]
    assert (first["status"], first["error"]["code"]) == ("failed", "superseded")
    await asyncio.sleep(2)  # the first one's summary comes meanwhile, to nothing
    here.calm()
    rows = await talk.audit()
    assert [row["status"] for row in rows[-2:]] == ["committed", "failed"]


async def test_a_gateway_that_was_stopped_commits_nothing_when_it_wakes(here: Place) -> None:
    here.engine_told.say(prefill={"delta_s": 1})
    talk = await Talk.begin(here.clients[0])
    await talk.until_compacting(here.engine_told, "prefill begins")
    here.gateways[0].send(signal.SIGSTOP)
    here.engine_told.say()
    other = at(here, talk, 1)
    assert (await other.compact())["reason"] == "running"
    await other.turn(words(99, 3000))
    await other.turn("and on")
    here.gateways[0].send(signal.SIGCONT)
    rows = await other.audit()
    assert (rows[-1]["status"], rows[-1]["error"]["code"]) == ("failed", "superseded")
    assert (await talk.context())["compaction_id"] == (await other.context())["compaction_id"]


async def test_a_session_that_the_other_gateway_deletes_leaves_nothing(here: Place) -> None:
    here.engine_told.say(prefill={"delta_s": 1.5})
    talk = await Talk.begin(here.clients[0])
    await talk.until_compacting(here.engine_told, "prefill begins")
    prefills = here.engine_told.seen("prefill begins")
    receipt = (await here.clients[1].delete(talk.path)).json()
    assert receipt["erased"]["compactions"] == 1
    await here.engine_told.until("prefill ends", prefills)
    until = time.monotonic() + 30
    while here.engine_told.last("forgets") < here.engine_told.last("prefill ends"):  # what was prefilled since
        assert time.monotonic() < until, "what was prefilled after the session was deleted is not forgotten"
        await asyncio.sleep(0.01)
    for client in here.clients:
        assert (await client.get(f"{talk.path}/compactions")).status_code == 404


@pytest.mark.prove
@pytest.mark.timeout(300)
async def test_a_run_of_a_minute_is_not_taken_for_dead(here: Place) -> None:
    """Its deadline is half of that; it says that it is at work."""
    here.engine_told.say(prefill={"delta_s": 19}, summary={"delta_s": 0.4})
    talk = await Talk.begin(here.clients[0])
    await talk.until_compacting(here.engine_told)
    began = time.monotonic()
    while (await talk.rows())[0]["status"] == "running":
        reason = (await at(here, talk, 1).compact()).get("reason")
        assert reason != "committed", "the other took it for dead"
        assert time.monotonic() - began < 120
        await asyncio.sleep(1)
    (row,) = await talk.settled()
    assert row["status"] == "committed", row
    assert row["report"]["duration_s"] > 33
    await talk.audit()
