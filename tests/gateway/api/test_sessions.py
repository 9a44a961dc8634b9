"""The session API: sessions, turns, branches, streams, export."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engines.echo import EchoEngine
from tests.gateway.live import Live, events_of, live_gateway

pytestmark = pytest.mark.anyio


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    async with live_gateway(tmp_path) as running:
        yield running


async def test_a_session_is_created_read_changed_and_erased(live: Live) -> None:
    made = await live.client.post("/v1/sessions", json={"id": "s1", "title": "T", "metadata": {"a": "b"}})
    assert made.status_code == 201
    assert made.headers["etag"] == '"1"'
    assert (await live.client.post("/v1/sessions", json={"id": "s1"})).status_code == 409
    assert (await live.client.patch("/v1/sessions/s1", json={"title": "U"})).status_code == 428
    changed = await live.client.patch("/v1/sessions/s1", json={"title": "U"}, headers={"if-match": '"1"'})
    assert changed.json()["title"] == "U"
    stale = await live.client.patch("/v1/sessions/s1", json={"title": "V"}, headers={"if-match": '"1"'})
    assert stale.status_code == 412
    await live.turn("s1", "hello")
    receipt = (await live.client.delete("/v1/sessions/s1")).json()
    assert receipt["deleted"] is True
    assert receipt["erased"]["turns"] == 1
    assert (await live.client.get("/v1/sessions/s1")).status_code == 404


async def test_creation_under_an_idempotency_key_is_repeatable(live: Live) -> None:
    headers = {"idempotency-key": "make"}
    first = await live.client.post("/v1/sessions", json={"title": "T"}, headers=headers)
    again = await live.client.post("/v1/sessions", json={"title": "T"}, headers=headers)
    assert first.json()["id"] == again.json()["id"]
    other = await live.client.post("/v1/sessions", json={"title": "X"}, headers=headers)
    assert other.status_code == 422


async def test_lists_page_by_cursor_and_hide_archived_sessions(live: Live) -> None:
    ids = [await live.session(title=f"t{i}") for i in range(5)]
    first = (await live.client.get("/v1/sessions", params={"limit": 3})).json()
    rest = (await live.client.get("/v1/sessions", params={"limit": 3, "cursor": first["next_cursor"]})).json()
    assert [s["id"] for s in first["data"] + rest["data"]] == ids[::-1]
    assert rest["has_more"] is False
    await live.client.post(f"/v1/sessions/{ids[0]}/archive")
    assert ids[0] not in [s["id"] for s in (await live.client.get("/v1/sessions")).json()["data"]]


async def test_each_prompt_extends_the_ids_of_the_path_before(live: Live) -> None:
    sid = await live.session(system="Be short.")
    for i in range(4):
        await live.turn(sid, f"message {i}")
    turns = await live.turns(sid, include="token_ids")
    for before, after in itertools.pairwise(turns):
        assert after["tokens"]["base_tokens"] == before["tokens"]["path_tokens"]
        assert after["prefix_report"]["reused_tokens"] == before["tokens"]["path_tokens"]
        assert after["usage"]["cached_tokens"] >= before["tokens"]["path_tokens"] - 1
        assert after["placement"]["reason"] == "pinned"


async def test_a_changed_system_prompt_renders_anew_and_says_so(live: Live) -> None:
    sid = await live.session(system="Be short.")
    await live.turn(sid, "one")
    await live.client.patch(f"/v1/sessions/{sid}", json={"system": "Be long."}, headers={"if-match": "*"})
    turn = (await live.turn(sid, "two")).json()
    assert turn["prefix_report"]["cause"] == "system_changed"
    assert turn["prefix_report"]["first_difference"] is not None
    context = (await live.client.get(f"/v1/sessions/{sid}/context")).json()
    assert context["messages"][0]["content"] == "Be long."


async def test_ephemeral_items_and_instructions_are_sent_but_not_kept(live: Live) -> None:
    sid = await live.session()
    await live.turn(sid, "one")
    items = [
        {"role": "user", "content": "document: the sky is green", "ephemeral": True},
        {"role": "user", "content": "what colour?"},
    ]
    plain = (await live.client.post(f"/v1/sessions/{sid}/count", json={"input": "what colour?"})).json()
    turn = (await live.turn(sid, items, instructions="Answer in one word.")).json()
    assert turn["usage"]["prompt_tokens"] > plain["input_tokens"]
    assert [i["content"] for i in turn["input"]] == ["what colour?"]
    context = (await live.client.get(f"/v1/sessions/{sid}/context")).json()
    assert "green" not in str(context["messages"])
    assert "one word" not in str(context["messages"])
    after = (await live.turn(sid, "three")).json()
    assert after["status"] == "completed"


async def test_count_and_context_agree_with_what_the_turn_sends(live: Live) -> None:
    sid = await live.session(system="Be short.")
    await live.turn(sid, "one")
    counted = (await live.client.post(f"/v1/sessions/{sid}/count", json={"input": "two"})).json()
    context = (await live.client.get(f"/v1/sessions/{sid}/context", params={"draft": "two"})).json()
    turn = (await live.turn(sid, "two")).json()
    assert counted["input_tokens"] == context["prompt_tokens"] == turn["usage"]["prompt_tokens"]
    parts = {part["part"]: part["tokens"] for part in context["parts"]}
    assert parts == {
        "system": len("Be short."),  # echo's tokenizer reads bytes
        "history": len("one") * 2,
        "input": len("two"),
        "template": context["prompt_tokens"] - len("Be short.") - 9,
    }
    standing = (await live.client.get(f"/v1/sessions/{sid}/context")).json()
    last = (await live.turns(sid, include="token_ids"))[-1]
    assert standing["prompt_tokens"] == last["tokens"]["path_tokens"]
    assert standing["prompt_sha256"]


@pytest.mark.parametrize("fields", [{}, {"system": "Be short."}, {"system": "x" * 9000}])
async def test_a_session_without_a_turn_counts_what_its_first_message_is_added_to(
    live: Live, fields: dict[str, str]
) -> None:
    sid = await live.session(**fields)
    standing = (await live.client.get(f"/v1/sessions/{sid}/context")).json()
    counted = (await live.client.post(f"/v1/sessions/{sid}/count", json={"input": "two"})).json()
    assert standing["prompt_tokens"] == counted["input_tokens"] - len("two") > len(fields.get("system", ""))
    assert sum(part["tokens"] for part in standing["parts"]) == standing["prompt_tokens"]
    assert standing["past_trigger"] == (standing["prompt_tokens"] > 0.7 * standing["window"] - 1024)


async def test_regenerate_and_edit_make_branches_and_the_old_turns_stay(live: Live) -> None:
    sid = await live.session()
    one = (await live.turn(sid, "one")).json()
    two = (await live.turn(sid, "two")).json()
    again = (await live.client.post(f"/v1/sessions/{sid}/turns/{two['id']}/regenerate")).json()
    assert (again["parent_id"], again["input"]) == (one["id"], two["input"])
    edited = (await live.client.post(f"/v1/sessions/{sid}/turns/1/edit", json={"input": "ONE"})).json()
    assert edited["parent_id"] is None
    head = (await live.client.get(f"/v1/sessions/{sid}")).json()["head_turn_id"]
    assert head == edited["id"]
    assert len(await live.turns(sid)) == 4
    assert [t["id"] for t in await live.turns(sid, branch=two["id"])] == [one["id"], two["id"]]
    leaves = (await live.client.get(f"/v1/sessions/{sid}/branches")).json()["data"]
    assert [t["id"] for t in leaves] == [edited["id"], again["id"], two["id"]]


async def test_a_parent_turn_makes_a_branch(live: Live) -> None:
    sid = await live.session()
    one = (await live.turn(sid, "one")).json()
    await live.turn(sid, "two")
    branch = (await live.turn(sid, "three", parent_turn_id=one["id"])).json()
    assert branch["parent_id"] == one["id"]
    assert (await live.turn(sid, "x", parent_turn_id="turn_nope")).status_code == 404


async def test_a_second_turn_at_once_is_busy(tmp_path: Path) -> None:
    slow = EchoEngine(tokens_per_s=20)
    async with live_gateway(tmp_path, {"echo": slow}) as live:
        sid = await live.session()
        first, second = await asyncio.gather(live.turn(sid, "a long enough message"), live.turn(sid, "me too, please"))
        codes = sorted([first.status_code, second.status_code])
        assert codes == [200, 409]
        busy = first if first.status_code == 409 else second
        assert busy.json()["error"]["code"] == "session_busy"
        assert int(busy.headers["retry-after"]) >= 1


async def test_cancel_keeps_the_partial_answer_and_the_session_goes_on_from_it(tmp_path: Path) -> None:
    slow = EchoEngine(tokens_per_s=30)
    async with live_gateway(tmp_path, {"echo": slow}) as live:
        sid = await live.session()
        text = "a message that takes a while to be echoed in full"
        running = asyncio.create_task(live.turn(sid, text))
        await asyncio.sleep(0.6)
        cancelled = await live.client.post(f"/v1/sessions/{sid}/turns/1/cancel")
        assert cancelled.status_code == 202
        turn = (await running).json()
        assert (turn["status"], turn["finish_reason"]) == ("incomplete", "cancelled")
        partial = turn["output"][0]["content"][0]["text"]
        assert partial
        assert text.startswith(partial)
        after = (await live.turn(sid, "ok")).json()
        assert after["parent_id"] == turn["id"]
        assert after["prefix_report"]["cause"] is None
        again = await live.client.post(f"/v1/sessions/{sid}/turns/1/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "turn_not_running")


async def streamed(live: Live, sid: str, text: str, **more: Any) -> list[dict[str, Any]]:
    body = {"input": text, "stream": True, "max_output_tokens": 64, **more}
    async with live.client.stream("POST", f"/v1/sessions/{sid}/turns", json=body) as response:
        return [event async for event in events_of(response)]


async def test_a_stream_is_numbered_and_can_be_read_again_from_any_number(live: Live) -> None:
    sid = await live.session()
    events = await streamed(live, sid, "a stream to resume")
    assert [e["sequence_number"] for e in events] == list(range(1, len(events) + 1))
    assert events[0]["type"] == "session.turn.started"
    assert events[-1]["type"] == "session.turn.completed"
    for after in range(len(events)):
        path = f"/v1/sessions/{sid}/turns/1/stream"
        async with live.client.stream("GET", path, params={"starting_after": after}) as response:
            assert [event async for event in events_of(response)] == events[after:]


async def test_an_export_comes_back_as_the_same_conversation(live: Live) -> None:
    sid = await live.session(system="Be short.", title="T")
    await live.turn(sid, "one")
    await live.turn(sid, "two")
    lines = await live.client.get(f"/v1/sessions/{sid}/export")
    made = await live.client.post("/v1/sessions/import", params={"id": "copy"}, content=lines.content)
    assert made.status_code == 201
    original = (await live.client.get(f"/v1/sessions/{sid}/context")).json()["messages"]
    copied = (await live.client.get("/v1/sessions/copy/context")).json()["messages"]
    assert copied == original
    assert (await live.turn("copy", "three")).json()["status"] == "completed"
    again = await live.client.post("/v1/sessions/import", params={"id": "copy"}, content=lines.content)
    assert again.status_code == 409


async def test_tool_outputs_must_answer_a_call(live: Live) -> None:
    sid = await live.session()
    item = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
    answer = await live.turn(sid, [item])
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "tool_output_unmatched")
