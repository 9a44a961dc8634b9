"""While a session is compacted its user comes back, edits, pins, patches, reverts, deletes: nothing is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.faults.compacted import SLOW, Place, Talk, place
from tests.faults.database import held
from tests.gateway.talks import WINDOW, words

pytestmark = pytest.mark.anyio
PHASES = ("summary", "prefill")


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """For the whole module: its processes are started once."""
    return "asyncio", {"use_uvloop": False}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('database')}/turnkeep.db"


@pytest.fixture(scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory, url: str) -> AsyncIterator[Place]:
    async with place(tmp_path_factory.mktemp("meanwhile"), url, summary_timeout_s=20) as here:
        yield here


@pytest.fixture
async def here(processes: Place) -> AsyncIterator[Place]:
    yield processes
    processes.calm()
    await processes.ready()


async def begun(here: Place, phase: str, **policy: object) -> Talk:
    """A conversation whose compaction is in that phase, for about two seconds."""
    here.engine_told.say(
        summary=SLOW if phase == "summary" else {}, prefill={"delta_s": 2} if phase == "prefill" else {}
    )
    talk = await Talk.begin(here.clients[0], **policy)
    await talk.until_compacting(here.engine_told, f"{phase} begins")
    return talk


async def test_turns_in_every_phase_are_answered_at_once_and_stand_in_order(here: Place) -> None:
    here.engine_told.say(summary=SLOW, prefill={"delta_s": 1})
    talk = await Talk.begin(here.clients[0])
    await talk.until_compacting(here.engine_told)
    summaries, prefills = (here.engine_told.seen(f"{phase} ends") for phase in PHASES)
    for _ in range(2):
        began = time.monotonic()
        turn = await talk.turn(f"while you work, {len(talk.heard)}")
        assert time.monotonic() - began < 1.0, "the turn waited for the compaction"
        assert turn["prefix_report"]["cause"] in (None, ""), turn["prefix_report"]
        assert here.engine_told.seen("summary ends") == summaries
    await here.engine_told.until("prefill begins", prefills + 1)
    await talk.turn("while you prefill")
    assert here.engine_told.seen("prefill ends") == prefills, "the prefill was over before the turn"
    (row,) = await talk.settled()
    assert row["status"] == "committed", row
    after = await talk.turn("and after")
    assert after["prefix_report"]["cause"] == "compacted"
    assert after["usage"]["cached_tokens"] > 0.8 * row["report"]["tokens_after"], "the new prefix was not prefilled"
    await talk.audit()


async def test_turns_sent_without_a_pause_lose_nothing(here: Place) -> None:
    """Planning, begin and commit take milliseconds: turn upon turn meets them all."""
    here.engine_told.say(summary={"delta_s": 0.002})
    talks = [await Talk.begin(here.clients[0]) for _ in range(4)]

    async def converse(talk: Talk) -> None:
        for number in range(24):
            await talk.turn(words(number + 1, 500))

    await asyncio.gather(*(converse(talk) for talk in talks))
    for talk in talks:
        rows = await talk.audit()
        assert "committed" in {row["status"] for row in rows}, rows


async def test_a_turn_that_meets_the_commit_goes_through_with_it(here: Place, url: str) -> None:
    talk = await begun(here, "prefill")
    async with held(url):
        await here.engine_told.until("prefill ends", here.engine_told.seen("prefill begins"))
        turn = asyncio.create_task(talk.turn("at the very moment"))
        await asyncio.sleep(0.7)
        assert not turn.done()
    await turn
    (row,) = await talk.settled()
    assert row["status"] == "committed", row
    await talk.audit()


@pytest.mark.parametrize("phase", PHASES)
async def test_a_turn_that_would_not_fit_does_not_wait_for_the_model(here: Place, phase: str) -> None:
    talk = await begun(here, phase)
    here.engine_told.say(summary={**SLOW, "then": "hang"}, prefill={"delta_s": 2, "then": "hang"})
    began = time.monotonic()
    turn = await talk.turn(words(99, 3000))
    assert time.monotonic() - began < 1.5, "the turn waited for the compaction's model"
    here.calm()
    rows = await talk.settled()
    assert turn["metadata"]["compaction"]["id"] in {row["id"] for row in rows if row["status"] == "committed"}
    source = rows[-1]["segments"][0]["source"]
    assert source in (("extracted",) if phase == "summary" else ("model", "repaired")), rows[-1]
    await talk.audit()


async def test_a_message_that_needs_more_than_the_run_under_way_frees_gets_it(here: Place) -> None:
    talk = await begun(here, "summary", target_ratio=0.55, keep_last=2)
    turn = await talk.turn(words(99, int(0.62 * WINDOW)))
    rows = await talk.settled()
    assert [row["trigger"] for row in rows] == ["foreground", "background"]
    assert turn["metadata"]["compaction"]["id"] == rows[0]["id"]
    await talk.turn("the window is full: room is made for this one, too")
    await talk.audit()


Act = Callable[[Talk], Awaitable[None]]


async def _edit_below(talk: Talk) -> None:
    """The path leaves before the summarised turns."""
    kept = talk.heard[:2]
    talk.heard = kept
    await talk.turn("another way", parent_turn_id=kept[-1].turn_id)


async def _branch_above(talk: Talk) -> None:
    kept = talk.heard[:-1]
    talk.heard = kept
    await talk.turn("another way", parent_turn_id=kept[-1].turn_id)


async def _patch_system(talk: Talk) -> None:
    await talk.patch(system="Be long.")


async def _patch_policy(talk: Talk) -> None:
    await talk.patch(policy={"strategy": "off", "max_output_tokens": 128})


async def _pin(talk: Talk) -> None:
    answer = await talk.client.put(f"{talk.path}/turns/3/pin")
    assert answer.status_code == 200, answer.text


async def _compact(talk: Talk) -> None:
    await talk.compact()


ACTS: dict[str, tuple[Act, set[str | None]]] = {
    "edit": (_edit_below, {None}),
    "branch": (_branch_above, {None}),
    "system": (_patch_system, {None}),
    "policy": (_patch_policy, {None}),
    "pin": (_pin, {"view_moved"}),
    "compact": (_compact, {None}),
}


@pytest.mark.parametrize("phase", ["summary", pytest.param("prefill", marks=pytest.mark.prove)])
@pytest.mark.parametrize("act", ACTS)
async def test_what_its_user_does_meanwhile_stands_and_the_compaction_says_what_became_of_it(
    here: Place, act: str, phase: str
) -> None:
    do, codes = ACTS[act]
    talk = await begun(here, phase)
    await do(talk)
    here.calm()
    first = (await talk.settled())[-1]
    assert (first["error"] or {}).get("code") in codes, first
    assert (first["status"] == "committed") == (first["error"] is None)
    await talk.audit()
    await talk.fill(2)
    await talk.audit()


async def test_another_model_meanwhile_reads_the_same_conversation(here: Place) -> None:
    talk = await begun(here, "summary")
    await talk.patch(model="scribe")
    here.calm()
    assert (await talk.settled())[0]["status"] == "committed"
    assert (await talk.turn())["model"] == "scribe"
    await talk.audit()


async def test_an_earlier_compaction_that_is_reverted_meanwhile_fails_the_one_that_builds_on_it(here: Place) -> None:
    here.engine_told.say()
    talk = await Talk.begin(here.clients[0])
    await talk.until_compacting(here.engine_told, "prefill ends")
    (first,) = await talk.settled()
    here.engine_told.say(summary=SLOW)
    await talk.until_compacting(here.engine_told)
    answer = await talk.client.post(f"{talk.path}/compactions/{first['id']}/revert")
    assert answer.json()["status"] == "reverted", answer.text
    here.calm()
    rows = await talk.settled()
    assert [row["status"] for row in rows[-2:]] == ["failed", "reverted"]
    assert rows[-2]["error"]["code"] == "view_moved"
    assert (await talk.context())["segments"] == []
    await talk.fill(3)  # the raw path is past the trigger, perhaps past the window: it is made to fit
    rows = await talk.audit()
    assert rows[0]["status"] == "committed", rows[0]


@pytest.mark.parametrize("phase", PHASES)
async def test_a_session_that_is_deleted_meanwhile_leaves_nothing(here: Place, phase: str) -> None:
    talk = await begun(here, phase)
    receipt = (await talk.client.delete(talk.path)).json()
    assert receipt["erased"]["compactions"] == 1
    ends = here.engine_told.seen(f"{phase} begins")
    await here.engine_told.until(f"{phase} ends", ends, within_s=2)
    for path in (talk.path, f"{talk.path}/compactions", f"{talk.path}/context"):
        assert (await talk.client.get(path)).status_code == 404
    other = await Talk.begin(here.clients[0])
    await other.fill(2)
    await other.audit()
