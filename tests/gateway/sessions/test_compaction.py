"""A conversation that passes its window goes on, shorter, with nothing lost: background, foreground, by request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from compression.budget import pressing
from compression.segments import HEADING
from engines.contract import Capabilities
from engines.echo import EchoEngine
from tests.gateway.live import Live, events_of, live_gateway
from tests.gateway.talks import WINDOW, compactions, context, noted, said, settled, summarising, talk, words

pytestmark = pytest.mark.anyio
EXTRACT = {"policy": {"strategy": "extract", "max_output_tokens": 64, "tokens_per_turn": 100}}
SUMMARY = {"policy": {"max_output_tokens": 64, "tokens_per_turn": 100}}


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    async with live_gateway(tmp_path, {"echo": summarising("no use")}) as running:
        yield running


async def test_past_the_trigger_old_turns_are_summarised_in_the_background(live: Live) -> None:
    session = await live.session(system="Be brief.", **EXTRACT)
    turns = await talk(live, session, 8)
    (row,) = await settled(live, session)
    assert (row["status"], row["trigger"]) == ("committed", "background")
    before, after = row["report"]["tokens_before"], row["report"]["tokens_after"]
    assert before + 64 > 0.7 * WINDOW
    assert after < 0.45 * WINDOW
    following = (await live.turn(session, "and now?")).json()
    assert following["usage"]["prompt_tokens"] < after + 60
    assert following["prefix_report"]["cause"] == "compacted"
    assert len(await live.turns(session)) == len(turns) + 1, "raw turns are gone"


async def test_what_is_sent_is_what_the_context_shows_with_its_segments_and_ledger(live: Live) -> None:
    session = await live.session(system="Be brief.", **EXTRACT)
    await talk(live, session, 8)
    await settled(live, session)
    shown = await context(live, session, "and now?")
    (segment,) = shown["segments"]
    assert segment["turns"] == [2, 3, 4, 5][: len(segment["turns"])]
    assert HEADING in said(shown)
    assert "PC-0002-X" in said(shown)
    assert "PC-0002-X" in " ".join(segment["facts"])
    assert words(1) in said(shown)
    assert words(8) in said(shown)
    turn = (await live.turn(session, "and now?")).json()
    assert turn["usage"]["prompt_tokens"] == shown["prompt_tokens"]


async def test_the_next_turn_finds_the_new_prefix_prefilled(live: Live) -> None:
    session = await live.session(system="Be brief.", **EXTRACT)
    await talk(live, session, 8)
    (row,) = await settled(live, session)
    assert row["report"]["prefill_tokens"] > 0
    turn = (await live.turn(session, "and now?")).json()
    assert turn["usage"]["cached_tokens"] >= row["report"]["tokens_after"] - 64


async def test_earlier_summaries_stay_as_they_are_when_more_turns_go(live: Live) -> None:
    session = await live.session(**EXTRACT)
    await talk(live, session, 8)
    first = (await settled(live, session))[0]
    await talk(live, session, 8, first=9)
    rows = await settled(live, session)
    assert [row["status"] for row in rows] == ["committed"] * len(rows)
    newest = rows[0]
    assert newest["base_id"] in {row["id"] for row in rows[1:]}
    assert newest["segments"][0] == first["segments"][0]
    covered = [turn for segment in newest["segments"] for turn in segment["turn_ids"]]
    assert len(covered) == len(set(covered))


async def test_a_model_writes_the_summary_and_its_source_is_told(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": summarising(noted)}) as live:
        session = await live.session(**SUMMARY)
        await talk(live, session, 8)
        (row,) = await settled(live, session)
        assert row["status"] == "committed"
        assert row["segments"][0]["source"] in ("model", "repaired")
        assert (row["report"]["summary_calls"], row["report"]["summariser"]) == (1, "echo")
        assert row["report"]["summary_cached_tokens"] > 0.8 * row["report"]["tokens_before"], "it was not a suffix"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "Error generating summary: connection reset",
        "I'm sorry, but I can't help with that.",
        "<think>I should look at the codes and",
        "Der Nutzer hat mehrere Paketnummern genannt und ist danach am alten Kanal spazieren gegangen, wie immer.",
        "word " * 800,
        "The same line again and again. " * 40,
    ],
    ids=["empty", "error", "refusal", "cut-reasoning", "language", "too-long", "loop"],
)
async def test_a_bad_summary_is_never_stored(tmp_path: Path, bad: str) -> None:
    async with live_gateway(tmp_path, {"echo": summarising(bad)}) as live:
        session = await live.session(**SUMMARY)
        await talk(live, session, 8)
        (row,) = await settled(live, session)
        assert row["status"] == "committed"
        (segment,) = row["segments"]
        assert segment["source"] == "extracted"
        assert not bad or bad[:20] not in segment["text"]
        assert "PC-0002-X" in segment["text"]
        assert row["report"]["problems"], "what was wrong is not told"


async def test_a_summariser_that_does_not_answer_in_time_is_replaced_by_extraction(tmp_path: Path) -> None:
    engine = summarising("x" * 200, tokens_per_s=20)
    async with live_gateway(tmp_path, {"echo": engine}, summary_timeout_s=0.3) as live:
        session = await live.session(**SUMMARY)
        await talk(live, session, 9, max_output_tokens=4)
        rows = await settled(live, session)
        assert rows[0]["segments"][0]["source"] == "extracted"
        assert any("0.3 s" in problem for problem in rows[0]["report"]["problems"])


async def test_a_turn_that_comes_meanwhile_neither_waits_nor_is_lost_nor_aborts_it(tmp_path: Path) -> None:
    engine = summarising(lambda text: "User gave codes PC-0002-X and PC-0003-X. " * 3, tokens_per_s=150)
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        session = await live.session(**SUMMARY)
        turns = 0
        while not live.app.state.gateway.room.compactions.is_running("default", session):
            turns += 1
            await talk(live, session, 1, first=turns, max_output_tokens=4)
        during = (await live.turn(session, "while you work", max_output_tokens=4)).json()
        running = live.app.state.gateway.room.compactions.is_running("default", session)
        assert running, "the turn waited for the compaction"
        assert during["status"] == "completed"
        assert "compacted" not in str(during["prefix_report"])
        (row,) = await settled(live, session)
        assert row["status"] == "committed"
        after = (await live.turn(session, "and after", max_output_tokens=4)).json()
        assert after["prefix_report"]["cause"] == "compacted"
        shown = said(await context(live, session))
        assert shown.index("while you work") < shown.index("and after")


async def test_a_summary_that_takes_too_long_is_not_heard_out_when_the_window_fills_up(tmp_path: Path) -> None:
    engine = summarising(lambda text: "User gave codes PC-0002-X and PC-0003-X. " * 30, tokens_per_s=60)
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        session, turns = await live.session(**SUMMARY), 0
        running = live.app.state.gateway.room.compactions.is_running
        while not running("default", session):
            turns += 1
            await talk(live, session, 1, first=turns, max_output_tokens=4)
        used, added = 0, 0
        while not pressing(WINDOW, used, 64, added):
            turns += 1
            (turn,) = await talk(live, session, 1, first=turns, max_output_tokens=4)
            added = turn["usage"]["prompt_tokens"] + turn["usage"]["output_tokens"] - used if used else 0
            used = turn["usage"]["prompt_tokens"] + turn["usage"]["output_tokens"]
        (row,) = await settled(live, session)
        assert (row["trigger"], row["status"], row["segments"][0]["source"]) == ("background", "committed", "extracted")
        full = "the window was nearly full"
        assert row["report"]["problems"][0] == f"{full}: the model was not heard out"
        assert row["report"]["problems"][-1] == f"{full}: the new prefix was not read before the switch"
        while running("default", session):  # noqa: ASYNC110 - pytest's own limit ends it
            await asyncio.sleep(0.01)
        after = (await live.turn(session, "and now?", max_output_tokens=4)).json()
        assert after["usage"]["cached_tokens"] >= row["report"]["tokens_after"] - 64, "it was not read after the switch"


async def test_a_turn_that_would_not_fit_is_compacted_before_it_begins(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    await talk(live, session, 8)
    assert await compactions(live, session) == []
    body = {"input": words(9, 2800), "stream": True, "max_output_tokens": 64}
    async with live.client.stream("POST", f"/v1/sessions/{session}/turns", json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = [event async for event in events_of(response)]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["session.turn.started", "session.compaction.started", "session.compaction.completed"]
    assert kinds[-1] == "session.turn.completed"
    told = events[2]["compaction"]
    assert told["report"]["tokens_after"] < told["report"]["tokens_before"]
    (row,) = await compactions(live, session)
    assert told == {name: value for name, value in row.items() if name not in ("segments", "elisions")}
    assert (events[1]["compaction"]["status"], events[1]["compaction"]["report"]) == ("running", {})
    assert events[-1]["turn"]["metadata"]["compaction"]["id"] == events[2]["compaction"]["id"]
    assert (await compactions(live, session))[0]["trigger"] == "foreground"


@pytest.mark.parametrize("policy", [{"on_overflow": "error"}, {"strategy": "off"}])
async def test_where_it_is_forbidden_a_turn_that_does_not_fit_is_refused_and_nothing_saved(
    live: Live, policy: dict[str, Any]
) -> None:
    session = await live.session(policy={"mode": "manual", **policy})
    await talk(live, session, 8)
    refused = await live.turn(session, words(9, 2800))
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert len(await live.turns(session)) == 8
    assert await compactions(live, session) == []


async def test_truncate_leaves_old_turns_out_and_says_so(live: Live) -> None:
    session = await live.session(policy={"strategy": "off", "on_overflow": "truncate"})
    await talk(live, session, 8)
    assert (await live.turn(session, words(9, 2800))).status_code == 200
    (row,) = await compactions(live, session)
    assert row["segments"][0]["source"] == "dropped"
    assert "earlier turns were left out" in said(await context(live, session))


async def test_turns_that_were_left_out_twice_are_told_of_in_one_line(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "trim"})
    for first in (1, 8):
        await talk(live, session, 7, first=first)
        assert (await live.client.post(f"/v1/sessions/{session}/compact")).json()["status"] == "committed"
    shown = await context(live, session)
    assert len(shown["segments"]) >= 2
    turns = sum(len(segment["turns"]) for segment in shown["segments"])
    assert f"[{turns} earlier turns were left out]" in said(shown)
    assert said(shown).count("left out") == 1


async def test_what_cannot_be_made_to_fit_is_refused_with_the_numbers(live: Live) -> None:
    session = await live.session(**EXTRACT)
    await talk(live, session, 2)
    refused = await live.turn(session, words(3, WINDOW))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["details"]["limit"] == WINDOW
    assert error["details"]["compaction"]["reason"] in ("floor", "nothing")
    assert len(await live.turns(session)) == 2


async def test_a_pasted_document_stays_whole_for_the_questions_about_it(live: Live) -> None:
    session = await live.session(**EXTRACT)
    document = words(1, int(0.7 * WINDOW))
    assert (await live.turn(session, document)).status_code == 200
    for question in ("What is in the middle of it?", "And at its end?"):
        assert [row["status"] for row in await settled(live, session)][:1] == ["skipped"]
        shown = await context(live, session, question)
        assert (document in said(shown), shown["elisions"]) == (True, [])
        assert (await live.turn(session, question)).json()["prefix_report"].get("cause") is None


async def test_a_fixed_overhead_past_the_trigger_does_not_loop(live: Live) -> None:
    session = await live.session(system=words(0, int(0.8 * WINDOW)), **EXTRACT)
    for number in range(1, 9):
        await live.turn(session, f"short {number}", max_output_tokens=8)
        await settled(live, session)
    rows = await compactions(live, session)
    assert len(rows) <= 4
    assert {row["status"] for row in rows} <= {"skipped"}
    assert rows[0]["plan"]["reason"] in ("floor", "nothing", "gain")


async def test_a_dry_run_plans_with_prices_and_changes_nothing(live: Live) -> None:
    session = await live.session(**EXTRACT)
    await talk(live, session, 6, size=400)
    planned = (await live.client.post(f"/v1/sessions/{session}/compact", json={"dry_run": True})).json()
    assert planned["status"] == "planned"
    assert planned["plan"]["tokens_after"] < planned["plan"]["tokens_before"]
    assert {option["way"] for option in planned["plan"]["options"]} >= {"keep", "extract"}
    assert await compactions(live, session) == []


async def test_asked_for_it_is_made_now_and_a_second_time_there_is_nothing_to_do(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    await talk(live, session, 7)
    made = (await live.client.post(f"/v1/sessions/{session}/compact", json={})).json()
    assert (made["status"], made["trigger"]) == ("committed", "manual")
    again = (await live.client.post(f"/v1/sessions/{session}/compact")).json()
    assert again["status"] == "skipped"
    assert again["reason"]


async def test_a_compaction_is_taken_back_with_those_that_build_on_it(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    await talk(live, session, 6)
    first = (await live.client.post(f"/v1/sessions/{session}/compact")).json()
    await talk(live, session, 3, first=7)
    second = (await live.client.post(f"/v1/sessions/{session}/compact")).json()
    assert second["base_id"] == first["id"]
    route = f"/v1/sessions/{session}/compactions/{first['id']}/revert"
    assert (await live.client.post(route)).json()["status"] == "reverted"
    assert {row["status"] for row in await compactions(live, session)} == {"reverted"}
    assert (await live.client.post(route)).status_code == 409
    assert words(3) in said(await context(live, session))
    assert (await context(live, session))["segments"] == []


async def test_pinned_turns_stay_and_one_that_is_pinned_later_comes_back(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    await talk(live, session, 7)
    pinned = await live.client.put(f"/v1/sessions/{session}/turns/3/pin")
    assert pinned.json()["pinned"] is True
    await live.client.post(f"/v1/sessions/{session}/compact")
    shown = await context(live, session)
    assert words(3) in said(shown)
    assert words(4) not in said(shown)
    assert shown["pinned"] == [3]
    await live.client.put(f"/v1/sessions/{session}/turns/4/pin")
    shown = await context(live, session, "and now?")
    assert words(4) in said(shown)
    turn = (await live.turn(session, "and now?")).json()
    assert turn["usage"]["prompt_tokens"] == shown["prompt_tokens"]
    await live.client.delete(f"/v1/sessions/{session}/turns/4/pin")
    assert words(4) not in said(await context(live, session))


@pytest.mark.parametrize("change", ["compact", "pin", "revert"])
async def test_the_context_tells_what_is_cached_with_a_draft_and_without(live: Live, change: str) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    await talk(live, session, 7)
    made = (await live.client.post(f"/v1/sessions/{session}/compact")).json()
    if change != "compact":
        await live.turn(session, "and on")
        route = f"compactions/{made['id']}/revert" if change == "revert" else "turns/4/pin"
        await live.client.request("POST" if change == "revert" else "PUT", f"/v1/sessions/{session}/{route}")
    standing, drafted = await context(live, session), await context(live, session, "and now?")
    assert standing["prefix_report"] == drafted["prefix_report"]
    assert standing["prefix_report"]["cause"] == "compacted"
    assert standing["cacheable_tokens"] == drafted["cacheable_tokens"] < standing["prompt_tokens"] / 2
    turn = (await live.turn(session, "and now?")).json()
    assert turn["prefix_report"]["reused_tokens"] == standing["cacheable_tokens"]
    settled_now = await context(live, session)
    assert settled_now["cacheable_tokens"] == settled_now["prompt_tokens"]


async def test_a_summary_whose_turns_are_all_pinned_is_not_shown_as_it_is_not_sent(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    await talk(live, session, 6)
    await live.client.post(f"/v1/sessions/{session}/compact")
    await live.client.put(f"/v1/sessions/{session}/turns/2/pin")
    (segment,) = (await context(live, session))["segments"]
    assert (segment["turns"], segment["turns_beside"]) == ([3], [2])
    assert "PC-0002-X" in segment["text"]
    await live.client.put(f"/v1/sessions/{session}/turns/3/pin")
    shown = await context(live, session)
    assert (shown["segments"], HEADING in said(shown)) == ([], False)


async def test_pins_that_would_fill_half_the_window_are_refused_with_the_numbers(live: Live) -> None:
    session = await live.session(policy={"mode": "manual"})
    await talk(live, session, 6, size=840)
    answers = [await live.client.put(f"/v1/sessions/{session}/turns/{n}/pin") for n in range(1, 7)]
    refused = [answer for answer in answers if answer.status_code == 409]
    assert refused
    assert refused[0].json()["error"]["code"] == "pin_budget"
    assert str(WINDOW // 2) in refused[0].json()["error"]["message"]


async def test_a_branch_below_a_summarised_turn_goes_on_from_the_raw_turns(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    turns = await talk(live, session, 7)
    await live.client.post(f"/v1/sessions/{session}/compact")
    branch = await live.turn(session, "another way", parent_turn_id=turns[2]["id"])
    assert branch.status_code == 200
    shown = said(await context(live, session))
    assert words(2) in shown
    assert words(3) in shown
    assert words(4) not in shown
    assert HEADING not in shown


async def test_a_branch_above_the_anchor_keeps_the_summary(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    turns = await talk(live, session, 7)
    await live.client.post(f"/v1/sessions/{session}/compact")
    await live.turn(session, "another way", parent_turn_id=turns[5]["id"])
    shown = said(await context(live, session))
    assert HEADING in shown
    assert words(6) in shown
    assert words(7) not in shown


async def test_a_session_that_is_deleted_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": summarising("x" * 200, tokens_per_s=20)}) as live:
        session = await live.session(**SUMMARY)
        turns = 0
        while not await compactions(live, session):
            turns += 1
            await talk(live, session, 1, first=turns, max_output_tokens=4)
        receipt = (await live.client.delete(f"/v1/sessions/{session}")).json()
        assert receipt["erased"]["compactions"] == 1
        await asyncio.sleep(0.3)
        assert not live.app.state.gateway.room.compactions.is_running("default", session)
        assert (await live.client.get(f"/v1/sessions/{session}/compactions")).status_code == 404


async def test_a_tenants_and_the_gateways_policy_hold_where_a_session_says_nothing(tmp_path: Path) -> None:
    settings = {"compaction": {"keep_last": 5, "strategy": "trim"}, "tenant_compaction": {"default": {"keep_last": 2}}}
    async with live_gateway(tmp_path, {"echo": summarising("")}, **settings) as live:
        session = await live.session(policy={"mode": "manual"})
        policy = (await context(live, session))["policy"]
        assert (policy["strategy"], policy["keep_last"], policy["mode"]) == ("trim", 2, "manual")


async def test_a_summariser_that_nobody_serves_is_refused_with_those_that_are(live: Live) -> None:
    policy = {"policy": {"summariser": "nosuch"}}
    refused = await live.client.post("/v1/sessions", json=policy)
    session = await live.session(policy={"summariser": "echo"})
    changed = await live.client.patch(f"/v1/sessions/{session}", json=policy, headers={"if-match": "*"})
    for answer in (refused, changed):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "model_not_found", "policy.summariser")
        assert error["message"].endswith("served are: echo")


async def test_keyed_chats_are_compacted_too(live: Live) -> None:
    headers = {"x-session-id": "chat-1"}
    for number in range(1, 10):
        answer = await live.chat([{"role": "user", "content": words(number)}], headers)
        assert answer.status_code == 200, answer.text
        await settled(live, "chat-1")
    assert (await compactions(live, "chat-1"))[-1]["status"] == "committed"


class Narrow(EchoEngine):
    """Tells a larger window than it has, as a server does that was started with a smaller one."""

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), window=8 * WINDOW)


async def test_an_engine_with_less_room_than_it_says_is_asked_once_more_with_less(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": Narrow(window=WINDOW, answer=lambda text, _: text[:20])}) as live:
        session = await live.session(**EXTRACT)
        turns = await talk(live, session, 14)
        told = [turn["metadata"].get("context_recovered") for turn in turns]
        assert told.count(True) >= 1
        assert all(turn["status"] == "completed" for turn in turns)
        refused = await live.turn(session, words(20, WINDOW + 500))
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert len(await live.turns(session)) == 14


async def test_an_imported_conversation_over_the_window_is_compacted_before_its_first_turn(live: Live) -> None:
    session = await live.session(policy={"mode": "manual", "strategy": "extract"})
    await talk(live, session, 8)
    await live.client.put(f"/v1/sessions/{session}/turns/3/pin")
    await live.client.post(f"/v1/sessions/{session}/compact")
    lines = (await live.client.get(f"/v1/sessions/{session}/export")).content
    assert orjson.loads(lines.splitlines()[-1])["object"] == "compaction"
    headers = {"content-type": "application/x-ndjson"}
    stripped = b"\n".join(  # as another program would have written it: nobody has counted its tokens
        orjson.dumps({**orjson.loads(line), "usage": {}}) if b'"turn"' in line[:16] else line
        for line in lines.splitlines()
    )
    made = await live.client.post("/v1/sessions/import?id=copy", content=stripped, headers=headers)
    assert made.status_code == 201, made.text
    assert made.json()["imported"] == {"turns": 8, "compactions_left_out": 1}
    shown = await context(live, "copy")
    assert (shown["segments"], shown["pinned"]) == ([], [3])
    turn = (await live.turn("copy", words(9, 2800))).json()
    assert turn["status"] == "completed", turn
    assert turn["metadata"]["compaction"]["tokens_after"] < turn["metadata"]["compaction"]["tokens_before"]
    assert words(3) in said(await context(live, "copy"))
