"""Erasures by end user, their receipts, and what waits for a replica that is away."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engines.contract import EngineUnreachable
from engines.echo import EchoEngine
from gateway.api.state import Gateway
from gateway.app import _sweep
from gateway.sessions import erasing
from tests.gateway.api.test_chat_mode import Recorder, in_front_of
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio

ANN = "ann@light.example"
SAID = "the lighthouse keeper counts eleven gulls"
LONG = "the keeper writes the hour into the book " * 40


class Deaf(EchoEngine):
    """Does not forget while it is deaf."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.deaf = False
        self.asked: list[str] = []

    async def forget(self, session: str, salt: str) -> dict[str, int] | None:
        self.asked.append(session)
        if self.deaf:
            raise EngineUnreachable("nobody answers", replica=self.name)
        return await super().forget(session, salt)


@pytest.fixture
async def engine() -> Deaf:
    return Deaf()


@pytest.fixture
async def live(tmp_path: Path, engine: Deaf) -> AsyncIterator[Live]:
    async with live_gateway(tmp_path, {"echo": engine}) as running:
        yield running


def rows_with(folder: Path, word: str) -> list[str]:
    """Tables with a row that holds the word."""
    with closing(sqlite3.connect(f"file:{folder}/turnkeep.db?mode=ro", uri=True)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return [name for name in names if any(word in repr(row) for row in database.execute(f"SELECT * FROM {name}"))]


async def erase(live: Live, user: str = ANN) -> dict[str, Any]:
    answer = await live.client.post("/v1/erasures", json={"user": user})
    told: dict[str, Any] = answer.json()
    assert answer.status_code == (200 if told["status"] == "done" else 202), answer.text
    return told


async def until(live: Live, path: str, status: str) -> dict[str, Any]:
    """What is there once its status is that."""
    async with asyncio.timeout(60):
        while (told := (await live.client.get(path)).json())["status"] != status:  # noqa: ASYNC110 - another's
            await asyncio.sleep(0.05)
    found: dict[str, Any] = told
    return found


async def until_done(live: Live, receipt: dict[str, Any]) -> dict[str, Any]:
    return await until(live, f"/v1/erasures/{receipt['id']}", "done")


async def until_running(live: Live, session: str) -> None:
    await until(live, f"/v1/sessions/{session}", "running")


async def post(live: Live, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = await live.client.post(path, json=body, headers=headers)
    assert answer.status_code in (200, 201), answer.text
    told: dict[str, Any] = answer.json()
    return told


async def all_of_ann(live: Live) -> list[str]:
    """Paths of what she said, by every way there is."""
    mine = await live.session(user_ref=ANN)
    await live.turn(mine, SAID)
    messages = [{"role": "user", "content": SAID}]
    await live.chat(messages, {"x-session-id": "keyed"}, user=ANN)
    matched = await live.chat(messages, user=ANN)
    response = await post(live, "/v1/responses", {"model": "echo", "input": SAID, "user": ANN})
    conversation = (await post(live, "/v1/conversations", {}))["id"]
    await post(
        live,
        "/v1/responses",
        {"model": "echo", "input": SAID, "conversation": conversation, "safety_identifier": ANN},
    )
    return [
        f"/v1/sessions/{mine}",
        "/v1/sessions/keyed",
        f"/v1/sessions/{matched.headers['x-turnkeep-session']}",
        f"/v1/responses/{response['id']}",
        f"/v1/conversations/{conversation}",
    ]


async def test_an_end_user_is_erased_wherever_the_user_spoke_and_nobody_else(
    live: Live, engine: Deaf, tmp_path: Path
) -> None:
    theirs = await live.session(user_ref="bob")
    await live.turn(theirs, "bob asks for the tide table")
    kept = engine.paths.cached_blocks
    paths = await all_of_ann(live)
    assert {"sessions", "turns", "items"} <= set(rows_with(tmp_path, SAID) + rows_with(tmp_path, ANN))
    receipt = await erase(live)
    assert (receipt["status"], receipt["scope"], receipt["sessions"]) == ("done", "user", 5)
    assert (receipt["erased"]["sessions"], receipt["erased"]["turns"]) == (5, 5)
    assert receipt["places"].keys() == {
        "database",
        *(f"{n} of {gateway_of(live).settings.gateway_name}" for n in ("echo", "memory")),
    }
    (replica,) = [told for name, told in receipt["places"].items() if name.startswith("echo")]
    assert (replica["state"], replica["sessions"]) == ("answered", 5)
    assert [(await live.client.get(path)).status_code for path in paths] == [404] * 5
    assert engine.paths.cached_blocks == kept
    assert (await live.client.get(f"/v1/sessions/{theirs}")).status_code == 200
    assert rows_with(tmp_path, SAID) == rows_with(tmp_path, ANN) == []


def gateway_of(live: Live) -> Gateway:
    found: Gateway = live.app.state.gateway
    return found


async def test_receipts_are_read_listed_and_found_by_the_user_whose_name_they_do_not_hold(live: Live) -> None:
    deleted = await live.session()
    await live.client.delete(f"/v1/sessions/{deleted}")
    await live.session(user_ref=ANN)
    first, again = await erase(live), await erase(live)
    assert (first["sessions"], again["sessions"]) == (1, 0)
    assert (await live.client.get(f"/v1/erasures/{first['id']}")).json() == first
    listed = (await live.client.get("/v1/erasures", params={"limit": 2})).json()
    assert [receipt["id"] for receipt in listed["data"]] == [again["id"], first["id"]]
    (rest,) = (await live.client.get("/v1/erasures", params={"cursor": listed["next_cursor"]})).json()["data"]
    assert (rest["scope"], rest["session_id"], rest["user_digest"]) == ("session", deleted, None)
    of_ann = (await live.client.get("/v1/erasures", params={"user": ANN})).json()["data"]
    assert [receipt["id"] for receipt in of_ann] == [again["id"], first["id"]]
    assert ANN not in str(of_ann)
    assert (await live.client.get("/v1/erasures", params={"status": "pending"})).json()["data"] == []


async def test_a_bad_wish_is_refused(live: Live) -> None:
    for body in ({}, {"user": ""}, {"user": "u" * 257}, {"user": 1}, {"user": "a", "more": 1}, {"user": "a\0b"}):
        answer = await live.client.post("/v1/erasures", json=body)
        assert answer.status_code == 400, body
    assert (await live.client.get("/v1/erasures", params={"cursor": "zzz"})).status_code == 400
    assert (await live.client.get("/v1/erasures/ers_none")).json()["error"]["code"] == "erasure_not_found"


async def test_a_replica_that_is_away_is_waited_for_across_a_restart(tmp_path: Path, engine: Deaf) -> None:
    engine.deaf = True
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        session = await live.session(user_ref=ANN)
        await live.turn(session, SAID)
        receipt = await erase(live)
        assert receipt["status"] == "pending"
        (waiting,) = [told for told in receipt["places"].values() if told["state"] == "pending"]
        assert (waiting["left"], waiting["tries"], waiting["error"]) == (1, 1, "nobody answers")
        assert (await live.client.get(f"/v1/sessions/{session}")).status_code == 404
        assert (await erase(live))["id"] == receipt["id"], "one that is not done goes on"
        assert engine.paths.cached_blocks
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        assert (await live.client.get(f"/v1/erasures/{receipt['id']}")).json()["status"] == "pending"
        engine.deaf = False
        done = await until_done(live, receipt)
        assert not engine.paths.cached_blocks
        assert done["completed_at"] >= done["at"]


async def test_a_replica_that_is_gone_is_waited_for_no_more(live: Live, engine: Deaf) -> None:
    engine.deaf = True
    session = await live.session()
    await live.turn(session, SAID)
    deleted = (await live.client.delete(f"/v1/sessions/{session}")).json()
    assert (deleted["deleted"], deleted["status"]) == (True, "pending")
    gateway = gateway_of(live)
    (place,) = [name for name, told in deleted["places"].items() if told["state"] == "pending"]
    await gateway.store.leave_place(place)
    await gateway.store.see_places([], memory_s=1e9, replicas_s=1e9)
    receipt = await until_done(live, {"id": deleted["erasure"]})
    assert receipt["places"][place]["state"] == "gone"


async def test_a_turn_that_runs_is_stopped_and_its_answer_is_not_brought_back(tmp_path: Path) -> None:
    engine = Deaf(tokens_per_s=40)
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        session = await live.session(user_ref=ANN)
        turn = asyncio.create_task(live.turn(session, LONG, max_output_tokens=2000))
        await until_running(live, session)
        receipt = await erase(live)
        assert (receipt["status"], receipt["sessions"]) == ("done", 1)
        assert (await turn).json()["status"] != "completed"
        assert (await live.client.get(f"/v1/sessions/{session}")).status_code == 404
        assert not engine.paths.cached_blocks
        assert rows_with(tmp_path, "the keeper writes") == []


async def test_erased_by_many_at_once_while_turns_begin_nothing_is_left_of_what_was_there(
    live: Live, tmp_path: Path
) -> None:
    sessions = [await live.session(user_ref=ANN) for _ in range(12)]
    turns = [asyncio.create_task(live.turn(session, SAID)) for session in sessions * 2]
    receipts = await asyncio.gather(*(erase(live) for _ in range(4)))
    await asyncio.gather(*turns)
    assert sum(receipt["sessions"] for receipt in {r["id"]: r for r in receipts}.values()) == 12
    assert [(await live.client.get(f"/v1/sessions/{session}")).status_code for session in sessions] == [404] * 12
    assert rows_with(tmp_path, SAID) == []


async def test_another_gateway_stops_its_turn_and_has_its_own_engine_forget(tmp_path: Path) -> None:
    here, there = Deaf(), Deaf(tokens_per_s=40)
    async with (
        live_gateway(tmp_path, {"echo": here}, gateway_name="a") as a,
        live_gateway(tmp_path, {"echo": there}, gateway_name="b") as b,
    ):
        session = await a.session(user_ref=ANN)
        await b.turn(session, SAID, max_output_tokens=4)
        assert there.paths.cached_blocks
        turn = asyncio.create_task(b.turn(session, LONG, max_output_tokens=2000))
        await until_running(a, session)
        receipt = await until_done(a, await erase(a))
        await turn
        assert {name: told["state"] for name, told in receipt["places"].items()} == dict.fromkeys(
            ("database", "echo of a", "echo of b", "memory of a", "memory of b"), "answered"
        )
        assert not there.paths.cached_blocks
        assert rows_with(tmp_path, "keeper") == []


async def test_rows_that_a_dead_gateway_left_half_erased_go_with_the_next_sweep(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_of(live)
    session = await live.session(user_ref=ANN)
    await live.turn(session, SAID)
    erasure = await gateway.store.begin_user_erasure("default", ANN, gateway.subject_of("default", ANN))
    assert (await live.client.get(f"/v1/erasures/{erasure}")).json()["status"] == "erasing"
    await erasing.go_on(gateway.room)
    assert rows_with(tmp_path, SAID), "who began it a moment ago may be at it"
    monkeypatch.setattr(erasing, "LEFT_S", -1.0)
    await erasing.go_on(gateway.room)
    assert (await until_done(live, {"id": erasure}))["sessions"] == 1
    assert rows_with(tmp_path, SAID) == rows_with(tmp_path, ANN) == []


async def test_a_server_that_keeps_no_sessions_cannot_forget_and_a_picture_goes_with_its_words(tmp_path: Path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJDREVGRw"}}
    async with in_front_of(Recorder({"content": "42"}).app, tmp_path, tokenizers={}) as live:
        told = [{"role": "user", "content": [{"type": "text", "text": SAID}, picture]}]
        assert (await live.chat(told, {"x-session-id": "seen"}, user=ANN)).status_code == 200
        assert rows_with(tmp_path, "QUJDREVGRw") == rows_with(tmp_path, SAID) == ["items"]
        receipt = await erase(live)
        assert receipt["status"] == "done"
        (replica,) = [told for name, told in receipt["places"].items() if name.startswith("127.0.0.1")]
        assert (replica["state"], replica["sessions"]) == ("cannot", 1)
        assert rows_with(tmp_path, "QUJDREVGRw") == rows_with(tmp_path, SAID) == []


async def test_sessions_whose_time_is_over_are_forgotten_by_replicas_too(tmp_path: Path, engine: Deaf) -> None:
    async with live_gateway(tmp_path, {"echo": engine}, tenant_session_ttl_s={"default": 0.5}) as live:
        own = await live.session(ttl_seconds=1)
        for session in (own, await live.session()):
            await live.turn(session, SAID)
        kept = await live.session(ttl_seconds=3600)
        gateway = gateway_of(live)
        async with asyncio.timeout(60):
            while rows_with(tmp_path, SAID) or engine.paths.cached_blocks:
                await _sweep(gateway.store, gateway.room, gateway.places, gateway.settings, gateway.clock)
                await asyncio.sleep(0.1)
        receipts = (await live.client.get("/v1/erasures")).json()["data"]
        assert [receipt["scope"] for receipt in receipts] == ["expired", "expired"]
        assert (await live.client.get(f"/v1/sessions/{kept}")).status_code == 200


async def test_an_archived_session_is_listed_on_request_takes_no_turns_and_comes_back(live: Live, engine: Deaf) -> None:
    session = await live.session()
    await live.turn(session, SAID)
    assert engine.paths.cached_blocks
    archived = await post(live, f"/v1/sessions/{session}/archive", {})
    assert archived["archived_at"] is not None
    assert not engine.paths.cached_blocks, "its KV is given up"
    assert (await live.client.get("/v1/sessions")).json()["data"] == []
    (listed,) = (await live.client.get("/v1/sessions", params={"archived": True})).json()["data"]
    assert listed["id"] == session
    for answer in (
        await live.turn(session, "more"),
        await live.chat([{"role": "user", "content": "more"}], {"x-session-id": session}),
        await live.client.post(
            f"/v1/conversations/{session}/items", json={"items": [{"role": "user", "content": "x"}]}
        ),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_archived")
    assert len(await live.turns(session)) == 1
    assert (await post(live, f"/v1/sessions/{session}/archive", {}))["archived_at"] == archived["archived_at"]
    back = await post(live, f"/v1/sessions/{session}/unarchive", {})
    assert back["archived_at"] is None
    assert (await live.turn(session, "more")).json()["status"] == "completed"
    assert [each["id"] for each in (await live.client.get("/v1/sessions")).json()["data"]] == [session]


async def test_a_session_that_answers_is_not_archived(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"echo": Deaf(tokens_per_s=40)}) as live:
        session = await live.session()
        turn = asyncio.create_task(live.turn(session, LONG, max_output_tokens=2000))
        await until_running(live, session)
        answer = await live.client.post(f"/v1/sessions/{session}/archive")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "session_busy")
        await live.client.delete(f"/v1/sessions/{session}")
        await turn


async def test_one_that_is_taken_up_again_is_not_forgotten_late(live: Live, engine: Deaf) -> None:
    engine.deaf = True
    session = await live.session()
    await live.turn(session, SAID)
    await post(live, f"/v1/sessions/{session}/archive", {})
    asked = len(engine.asked)
    await post(live, f"/v1/sessions/{session}/unarchive", {})
    engine.deaf = False
    assert await gateway_of(live).store.due_places() == frozenset()
    await gateway_of(live).places.look()
    assert (len(engine.asked), bool(engine.paths.cached_blocks)) == (asked, True)
