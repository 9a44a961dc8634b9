"""The replica that writes summaries is down, dies, hangs, breaks off or is slow: the turns go on, and it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.faults.compacted import Place, Talk, place

pytestmark = pytest.mark.anyio
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """For the whole module: its processes are started once."""
    return "asyncio", {"use_uvloop": False}


@pytest.fixture(scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("summariser")
    url = f"sqlite:///{folder}/turnkeep.db"
    async with place(folder, url, summary_timeout_s=TIMEOUT_S) as here:
        yield here


@pytest.fixture
async def here(processes: Place) -> AsyncIterator[Place]:
    yield processes
    processes.calm()
    await processes.ready()


async def compacted(here: Place, **policy: Any) -> tuple[Talk, dict[str, Any]]:
    """A conversation past its trigger, and its first compaction when that is over; every turn was answered at once."""
    return await past_trigger(await Talk.begin(here.clients[0], **policy))


async def past_trigger(talk: Talk) -> tuple[Talk, dict[str, Any]]:
    while not (rows := await talk.rows()):
        began = time.monotonic()
        await talk.turn()
        assert time.monotonic() - began < TIMEOUT_S, "a turn waited for the summary"
        assert len(talk.heard) < 20, "no compaction began"
        await asyncio.sleep(0.1)
    rows = await talk.settled()
    return talk, rows[-1]


async def test_another_model_writes_the_summary(here: Place) -> None:
    here.scribe_told.say(summary={"delta_s": 0.01})
    talk, row = await compacted(here, summariser="scribe")
    assert (row["status"], row["report"]["summariser"]) == ("committed", "scribe")
    assert row["segments"][0]["source"] in ("model", "repaired")
    assert row["report"]["problems"] == []
    await talk.audit()


AT_LENGTH = ("breaks off", "dies in its answer", "hangs in its answer", "is too slow")  # proofs
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "refuses": ({"then": "refuse"}, "refused"),
    "breaks off": ({"after": 4, "then": "lose"}, "the stream breaks"),
    "dies at once": ({"then": "die"}, "cannot be reached"),
    "dies in its answer": ({"after": 4, "then": "die"}, "broke"),
    "hangs": ({"then": "hang"}, f"within {TIMEOUT_S:g} s"),
    "hangs in its answer": ({"after": 4, "then": "hang"}, f"within {TIMEOUT_S:g} s"),
    "is too slow": ({"delta_s": 0.5}, f"within {TIMEOUT_S:g} s"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.prove] if name in AT_LENGTH else []) for name in FAULTS]
)
async def test_a_summariser_that_fails_is_replaced_by_extraction(here: Place, fault: str) -> None:
    how, problem = FAULTS[fault]
    here.scribe_told.say(summary=how)
    talk, row = await compacted(here, summariser="scribe")
    assert row["status"] == "committed", row
    assert [segment["source"] for segment in row["segments"]] == ["extracted"]
    assert "PC-0002-X" in row["segments"][0]["text"]
    assert any(problem in told for told in row["report"]["problems"]), row["report"]["problems"]
    await talk.audit()
    here.calm()
    await here.ready()
    done = len(await talk.rows())
    while len(await talk.rows()) == done:
        await talk.turn()
        await asyncio.sleep(0.3)  # a run that has begun is seen: turns that rush on would leave no time for a model
    later = (await talk.settled())[0]
    assert later["segments"][-1]["source"] in ("model", "repaired"), "it is not asked again"
    await talk.audit()


async def test_a_summariser_that_is_not_there_is_not_waited_for(here: Place) -> None:
    """It was served when the session began."""
    talk = await Talk.begin(here.clients[0], summariser="scribe")
    scribe = f"/admin/v1/replicas/{here.scribe.url.removeprefix('http://')}"
    assert (await here.clients[0].post(f"{scribe}/drain", json={"force": True})).is_success
    try:
        talk, row = await past_trigger(talk)
    finally:
        assert (await here.clients[0].post(f"{scribe}/undrain")).is_success
    assert row["status"] == "committed"
    assert row["segments"][0]["source"] == "extracted"
    assert "scribe" in row["report"]["problems"][0]
    assert row["report"]["duration_s"] < TIMEOUT_S
    await talk.audit()


@pytest.mark.parametrize("then", ["hang", "lose", "die"])
async def test_a_prefill_that_fails_costs_the_next_turn_its_cache_and_nothing_else(here: Place, then: str) -> None:
    here.engine_told.say(prefill={"then": then})
    talk = await Talk.begin(here.clients[0], strategy="extract")
    await talk.until_compacting(here.engine_told, "prefill begins")
    (row,) = await talk.settled()
    assert row["status"] == "committed", row
    assert any("not prefilled" in told for told in row["report"]["problems"]), row["report"]
    here.calm()
    await here.ready()
    await talk.audit()
