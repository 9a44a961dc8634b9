"""A gateway that stops hands its turns over: another goes on with them, and their readers go on there."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from engines.echo import ECHO_MODEL_DIR, EchoEngine
from engines.echo_tokens import IM_END
from tests.faults.broken_echo import Chatty, Fate
from tests.gateway.live import Live, events_of, live_gateway

pytestmark = pytest.mark.anyio

TEXT = "zwölf 世界 👩‍👩‍👧 of the hour, and the keeper writes it down"
IDS = [*TEXT.encode(), IM_END]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"q": "dusk é"}}\n</tool_call>'
THOUGHT = f"<think>\nthe hour, 世界\n</think>\n\nI look. {CALL}\n{CALL}"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@asynccontextmanager
async def two(folder: Path, engine: EchoEngine, model_dir: Path = ECHO_MODEL_DIR) -> AsyncIterator[tuple[Live, Live]]:
    """Two gateways on one database, before one engine; their grace is short."""
    given: dict[str, Any] = {"grace_s": 0.05, "handover_s": 5, "tokenizers": {"echo": model_dir}}
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(live_gateway(folder, {"echo": engine}, gateway_name=name, **given))
            for name in ("first", "second")
        ]
        yield a, b


def slow(**more: Any) -> EchoEngine:
    return EchoEngine(chunk_tokens=1, tokens_per_s=120, **{"fingerprint": "weights-1", **more})


def stop(live: Live) -> None:
    """As SIGTERM does."""
    live.app.state.stopping = True


async def begun(live: Live, session: str, events: list[dict[str, Any]], pieces: int, **body: Any) -> None:
    """A streamed turn whose gateway is stopped after so many pieces."""
    sent = {"max_output_tokens": 200, "stream": True, "input": TEXT, **body}
    async with live.client.stream("POST", f"/v1/sessions/{session}/turns", json=sent) as response:
        async for event in events_of(response):
            events.append(event)
            if len(events) == pieces + 1:
                stop(live)


async def follow(live: Live, session: str, turn: str, after: int) -> list[dict[str, Any]]:
    path = f"/v1/sessions/{session}/turns/{turn}/stream"
    async with live.client.stream("GET", path, headers={"last-event-id": str(after)}) as response:
        return [event async for event in events_of(response)]


async def moved(a: Live, b: Live, session: str, pieces: int, **body: Any) -> list[dict[str, Any]]:
    """All events of a turn that begins at `a` and ends at `b`, as one reader has them."""
    events: list[dict[str, Any]] = []
    await begun(a, session, events, pieces, **body)
    assert events.pop()["type"] == "session.turn.handed_over"
    events += await follow(b, session, events[0]["turn"]["id"], len(events))
    assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    return events


def joined(events: list[dict[str, Any]], kind: str = "output_text") -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


@pytest.mark.parametrize("pieces", [1, 12])
async def test_another_gateway_goes_on_and_the_reader_goes_on_there(tmp_path: Path, pieces: int) -> None:
    async with two(tmp_path, slow()) as (a, b):
        session = await a.session()
        before = (await a.turn(session, "first")).json()
        events = await moved(a, b, session, pieces, logprobs=True)
        turn = events[-1]["turn"]
        assert (turn["status"], turn["finish_reason"], joined(events)) == ("completed", "stop", TEXT)
        (handed,) = turn["metadata"]["handed_over"]
        assert handed["from"] == "first"
        assert pieces <= handed["at_tokens"] < len(IDS)
        assert (turn["usage"]["output_tokens"], turn["seq"]) == (len(IDS), 2)
        logprobs = [p["logprob"] for event in events for p in event.get("logprobs", ())]
        assert logprobs == [-((31 * id + at) % 97 + 1) / 100 for at, id in enumerate(IDS)]
        _, stored = await b.turns(session, include="token_ids")
        assert (stored["tokens"]["output_ids"], stored["parent_id"]) == (IDS, before["id"])
        assert stored["placement"]["fingerprint"] == "weights-1"
        assert stored["output"][0]["content"][0]["text"] == TEXT
        after = (await b.turn(session, "on")).json()
        assert after["prefix_report"]["reused_tokens"] == stored["tokens"]["path_tokens"]
        assert after["usage"]["cached_tokens"] == stored["tokens"]["path_tokens"] - 1
        refused = await a.turn(session, "here?")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize("pieces", [2, 6])
async def test_reasoning_and_a_second_tool_call_go_on_too(tmp_path: Path, pieces: int) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(ECHO_MODEL_DIR, model_dir)
    shutil.copy(Path(__file__).parents[1] / "fixtures" / "templates" / "qwen3.jinja", model_dir / "chat_template.jinja")
    async with two(tmp_path, slow(answer=lambda text, sampling: THOUGHT), model_dir) as (a, b):
        session = await a.session(tools=[TOOL])
        events = await moved(a, b, session, pieces)
        assert (joined(events, "reasoning_text"), joined(events)) == ("the hour, 世界", "I look.")
        calls = [event for event in events if event.get("call_id")]
        assert [call["name"] for call in calls] == ["look_up", "look_up"]
        turn = events[-1]["turn"]
        assert [item["call_id"] for item in turn["output"] if item["type"] == "function_call"] == [
            call["call_id"] for call in calls
        ]
        assert [orjson.loads(call["delta"]) for call in calls] == 2 * [{"q": "dusk é"}]
        assert turn["finish_reason"] == "tool_calls"


async def test_a_stop_string_that_had_begun_is_met_there(tmp_path: Path) -> None:
    async with two(tmp_path, slow()) as (a, b):
        session = await a.session()
        events = await moved(a, b, session, 14, stop=["down"], instructions="once")
        assert joined(events) == f"once\n\n{TEXT}".removesuffix("down")
        after = (await b.turn(session, "on")).json()  # goes on from what is kept: without the instructions
        assert after["status"] == "completed"


async def test_who_waits_for_a_whole_answer_gets_it_from_the_other_by_the_same_key(tmp_path: Path) -> None:
    async with two(tmp_path, slow()) as (a, b):
        session = await a.session()
        key = {"idempotency-key": "k"}
        asked = [
            asyncio.create_task(a.turn(session, TEXT, headers=key, max_output_tokens=200)),
            asyncio.create_task(a.chat([{"role": "user", "content": TEXT}], headers=key, max_tokens=200)),
        ]
        await asyncio.sleep(0.3)
        stop(a)
        for answer in await asyncio.gather(*asked):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "turn_handed_over")
            assert answer.headers["retry-after"] == "1"
        turn = (await b.turn(session, TEXT, headers=key, max_output_tokens=200)).json()
        assert (turn["output"][0]["content"][0]["text"], len(await b.turns(session))) == (TEXT, 1)
        assert turn["metadata"]["handed_over"][0]["from"] == "first"
        chat = (await b.chat([{"role": "user", "content": TEXT}], headers=key, max_tokens=200)).json()
        assert (chat["choices"][0]["message"]["content"], chat["turnkeep"]["handed_over"][0]["from"]) == (TEXT, "first")


async def test_a_cancel_works_where_the_turn_went(tmp_path: Path) -> None:
    async with two(tmp_path, slow()) as (a, b):
        session = await a.session()
        events: list[dict[str, Any]] = []
        await begun(a, session, events, 3)
        turn = events[0]["turn"]["id"]
        assert (await b.client.post(f"/v1/sessions/{session}/turns/{turn}/cancel")).status_code == 202
        rest = await follow(b, session, turn, len(events) - 1)
        assert (rest[-1]["type"], rest[-1]["turn"]["finish_reason"]) == ("session.turn.incomplete", "cancelled")


async def test_a_cancel_at_a_gateway_that_hands_the_turn_over_is_heard_where_it_goes(tmp_path: Path) -> None:
    given: dict[str, Any] = {"grace_s": 0.05, "handover_s": 5}
    engine = slow()
    async with live_gateway(tmp_path, {"echo": engine}, gateway_name="first", **given) as a:
        session = await a.session()
        events: list[dict[str, Any]] = []
        async with asyncio.TaskGroup() as both:
            both.create_task(begun(a, session, events, 3))
            while not await a.app.state.gateway.store.offered_turns("somebody else"):  # noqa: ASYNC110 - in the store
                await asyncio.sleep(0.02)
            turn = events[0]["turn"]["id"]
            assert (await a.client.post(f"/v1/sessions/{session}/turns/{turn}/cancel")).status_code == 202
            async with live_gateway(tmp_path, {"echo": engine}, gateway_name="second", **given) as b:
                rest = await follow(b, session, turn, len(events))
    assert (rest[-1]["type"], rest[-1]["turn"]["finish_reason"]) == ("session.turn.incomplete", "cancelled")


async def test_where_nobody_takes_it_the_turn_is_incomplete_as_it_is_without_others(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": slow()}, grace_s=0.05, handover_s=0.5) as live:
        session = await live.session()
        events: list[dict[str, Any]] = []
        await begun(live, session, events, 5)
        turn = events[-1]["turn"]
        assert (events[-1]["type"], turn["error"]["code"]) == ("session.turn.incomplete", "gateway_shutdown")
        (stored,) = await live.turns(session, include="token_ids")
        assert (stored["status"], stored["finish_reason"]) == ("incomplete", None)
        said = bytes(stored["tokens"]["output_ids"])
        assert joined(events) == said.decode(errors="ignore") == stored["output"][0]["content"][0]["text"]


async def test_what_went_out_as_messages_is_not_offered(tmp_path: Path) -> None:
    engine = Chatty(fate=Fate(times=0), tokens_per_s=120)
    async with two(tmp_path, engine) as (a, _):
        events: list[dict[str, Any]] = []
        await begun(a, await a.session(), events, 5)
        assert (events[-1]["type"], events[-1]["turn"]["error"]["code"]) == (
            "session.turn.incomplete",
            "gateway_shutdown",
        )


async def test_a_gateway_that_has_only_another_model_under_the_name_leaves_it_alone(tmp_path: Path) -> None:
    given: dict[str, Any] = {"grace_s": 0.05, "handover_s": 0.6}
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(
                live_gateway(tmp_path, {"echo": slow(fingerprint=name)}, gateway_name=name, **given)
            )
            for name in ("old", "new")
        ]
        session = await a.session()
        events: list[dict[str, Any]] = []
        await begun(a, session, events, 4)
        assert events[-1]["type"] == "session.turn.incomplete"
        after = (await b.turn(session, "on")).json()
    assert after["placement"]["model_changed"] == {"from": "old", "to": "new"}
