"""Replicas that fail under an answer: it goes on elsewhere, without a byte twice or lost, or says honestly that not."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from engines.contract import Engine
from engines.echo import ECHO_MODEL_DIR
from engines.echo_tokens import IM_END, encode
from engines.remote.http import Timeouts
from engines.remote.turnkeep import TurnkeepEngine
from gateway.fleet.replica import FAILURES_TO_OPEN
from tests.contracts.live import Mangle
from tests.contracts.subjects import Subject, chatml, turnkeep
from tests.faults.broken_echo import Chatty, Fate, Foreign, Forger, Fragile, Halting, Limited, Mortal
from tests.gateway.live import Live, events_of, live_gateway

pytestmark = pytest.mark.anyio

TEXT = "zwölf 世界 👩‍👩‍👧 of the hour"  # with characters of two to four bytes
IDS = [*TEXT.encode(), IM_END]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"q": "dusk é"}}\n</tool_call>'
THOUGHT = f"<think>\nthe hour, 世界\n</think>\n\nI look. {CALL}"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
Kinds = tuple[type[Mortal], type[Mortal]]
KINDS: list[Kinds] = [(Mortal, Mortal), (Foreign, Foreign), (Mortal, Foreign)]
EVERY = 4  # which of an answer's ids the replica dies after


@asynccontextmanager
async def pair(
    folder: Path, kinds: Kinds, fate: Fate, model_dir: Path = ECHO_MODEL_DIR, **echo: Any
) -> AsyncIterator[Live]:
    """Two replicas: the one that is asked first dies as `fate` says."""
    engines: dict[str, Engine] = {
        name: kind(name=name, fate=fate, **echo) for name, kind in zip("ab", kinds, strict=True)
    }
    async with live_gateway(folder, engines, tokenizers={"echo": model_dir}) as live:
        yield live


async def well(live: Live) -> None:
    """Every replica is in rotation again, as it is by itself some seconds after a failure."""
    fleet = live.app.state.gateway.fleet
    for replica in fleet:
        replica.was_down, replica.rest_until = True, 0.0
        await fleet.probe(replica)


async def dying(live: Live, fate: Fate, cuts: Iterable[int]) -> AsyncIterator[int]:
    """Each of `cuts`, as that which the next answer's replica dies after."""
    for k in cuts:
        fate.ids, fate.times = k, 1
        await well(live)
        yield k


def moved(turn: dict[str, Any], at: int, reason: str = "lost") -> None:
    """It moved once, and says so."""
    (move,) = turn["metadata"]["continued"]
    assert (move["at_tokens"], move["reason"]) == (at, reason)
    assert move["from"] != move["to"] == turn["metadata"]["replica"]


def joined(events: Sequence[dict[str, Any]], kind: str) -> str:
    return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")


async def streamed(live: Live, session: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    sent = {"max_output_tokens": 200, "stream": True, **body}
    path = f"/v1/sessions/{session}/turns"
    async with live.client.stream("POST", path, json=sent, headers=headers) as response:
        events = [event async for event in events_of(response)]
    assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    return events


async def chat_chunks(live: Live, text: str, **more: Any) -> list[dict[str, Any]]:
    body = {"model": "echo", "messages": [{"role": "user", "content": text}], "stream": True, **more}
    async with live.client.stream("POST", "/v1/chat/completions", json=body) as response:
        return [chunk async for chunk in events_of(response)]


@pytest.mark.parametrize("kinds", KINDS)
async def test_an_answer_goes_on_after_any_of_its_ids(tmp_path: Path, kinds: Kinds) -> None:
    fate = Fate()
    async with pair(tmp_path, kinds, fate) as live:
        async for k in dying(live, fate, range(1, len(IDS), EVERY)):
            session = await live.session()
            events = await streamed(live, session, {"input": TEXT, "logprobs": True, "top_logprobs": 1})
            turn = events[-1]["turn"]
            assert (turn["status"], turn["finish_reason"], joined(events, "output_text")) == ("completed", "stop", TEXT)
            moved(turn, k)
            prompt = len(encode(chatml(TEXT)))
            assert (turn["usage"]["prompt_tokens"], turn["usage"]["output_tokens"]) == (prompt, len(IDS))
            logprobs = [p["logprob"] for event in events for p in event.get("logprobs", ())]
            assert logprobs == [-((31 * id + at) % 97 + 1) / 100 for at, id in enumerate(IDS)]
            (stored,) = await live.turns(session, include="token_ids")
            assert stored["tokens"]["output_ids"] == IDS
            assert stored["output"][0]["content"][0]["text"] == TEXT
            after = (await live.turn(session, "on")).json()
            assert after["placement"]["reason"] == "pinned"
            assert after["prefix_report"]["reused_tokens"] == prompt + len(IDS)
            if Foreign not in kinds:  # the session's path lies there as if it had never moved
                assert after["usage"]["cached_tokens"] >= prompt + len(IDS) - 1


async def test_in_chat_streams_and_whole_answers_too(tmp_path: Path) -> None:
    fate = Fate(2)
    async with pair(tmp_path, (Mortal, Mortal), fate) as live:
        chunks = await chat_chunks(live, TEXT)
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == TEXT
        assert chunks[-1]["turnkeep"]["continued"][0]["at_tokens"] == 2
        fate.ids, fate.times = 7, 1
        await well(live)
        answer = (await live.chat([{"role": "user", "content": TEXT}])).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert answer["usage"]["completion_tokens"] == len(IDS)
        assert answer["turnkeep"]["continued"][0]["at_tokens"] == 7
        fate.ids, fate.times = 8, 1
        await well(live)
        session = await live.session()
        turn = (await live.turn(session, TEXT)).json()
        assert turn["output"][0]["content"][0]["text"] == TEXT
        moved(turn | {"metadata": turn["metadata"] | turn["placement"]}, 8)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("stop", ["世界", " of", "👧 o"])
async def test_a_stop_string_is_met_wherever_it_is_cut(tmp_path: Path, kinds: Kinds, stop: str) -> None:
    """Cut before it, at each byte within it, and nothing of it is ever told."""
    begins = TEXT.encode().index(stop.encode())
    fate = Fate()
    async with pair(tmp_path, kinds, fate) as live:
        async for k in dying(live, fate, range(begins, begins + len(stop.encode()))):
            session = await live.session()
            events = await streamed(live, session, {"input": TEXT, "stop": [stop]})
            assert joined(events, "output_text") == TEXT.partition(stop)[0]
            turn = events[-1]["turn"]
            moved(turn, k)
            assert turn["finish_reason"] == "stop"
            assert turn["usage"]["output_tokens"] == begins + len(stop.encode())


@pytest.mark.parametrize("kinds", KINDS)
async def test_reasoning_and_tool_calls_are_cut_anywhere(tmp_path: Path, kinds: Kinds) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(ECHO_MODEL_DIR, model_dir)
    shutil.copy(Path(__file__).parents[1] / "fixtures" / "templates" / "qwen3.jinja", model_dir / "chat_template.jinja")
    fate = Fate()
    async with pair(tmp_path, kinds, fate, model_dir, answer=lambda text, sampling: THOUGHT) as live:
        async for k in dying(live, fate, range(1, len(THOUGHT.encode()), 4 * EVERY + 1)):
            session = await live.session(tools=[TOOL])
            events = await streamed(live, session, {"input": "look it up"})
            assert joined(events, "reasoning_text") == "the hour, 世界"
            assert joined(events, "output_text") == "I look."
            calls = [event for event in events if event.get("call_id")]
            assert [call["name"] for call in calls] == ["look_up"]
            assert orjson.loads(joined(events, "function_call_arguments")) == {"q": "dusk é"}
            turn = events[-1]["turn"]
            moved(turn, k)
            assert turn["finish_reason"] == "tool_calls"
            assert turn["output"][-1]["call_id"] == calls[0]["call_id"]


async def test_one_that_dies_twice_goes_on_twice_and_each_replica_is_asked_once(tmp_path: Path) -> None:
    fate = Fate(6, times=2)
    engines: dict[str, Engine] = {name: Mortal(name=name, fate=fate) for name in "abc"}
    async with live_gateway(tmp_path, engines) as live:
        session = await live.session()
        events = await streamed(live, session, {"input": TEXT})
        moves = events[-1]["turn"]["metadata"]["continued"]
        assert [move["at_tokens"] for move in moves] == [6, 12]
        assert {moves[0]["from"], *(move["to"] for move in moves)} == {"a", "b", "c"}
        assert joined(events, "output_text") == TEXT


async def test_where_all_die_the_error_says_so_and_the_same_key_gives_one_answer(tmp_path: Path) -> None:
    fate = Fate(6, times=2)
    engines: dict[str, Engine] = {name: Mortal(name=name, fate=fate) for name in "ab"}
    async with live_gateway(tmp_path, engines) as live:
        session = await live.session()
        told = await streamed(live, session, {"input": TEXT}, **{"idempotency-key": "k"})
        turn = told[-1]["turn"]
        assert (told[-1]["type"], turn["error"]["code"]) == ("session.turn.incomplete", "upstream_lost")
        assert turn["error"]["partial"] is True
        begun = IDS[:12]
        assert joined(told, "output_text") == bytes(begun).decode(errors="ignore")
        (stored,) = await live.turns(session, include="token_ids")
        assert (stored["status"], stored["tokens"]["output_ids"]) == ("incomplete", begun)
        assert stored["output"][0]["content"][0]["text"] == joined(told, "output_text")
        events = await until_answered(live, session, {"input": TEXT}, **{"idempotency-key": "k"})
        assert joined(events, "output_text") == TEXT
        (turn,) = await live.turns(session)
        assert (turn["id"], turn["status"]) == (stored["id"], "completed")


async def until_answered(live: Live, session: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """Once a replica is back in rotation: within 5 s."""
    for _ in range(50):
        sent = {"max_output_tokens": 200, "stream": True, **body}
        answer = await live.client.post(f"/v1/sessions/{session}/turns", json=sent, headers=headers)
        if answer.status_code == 200:
            return [orjson.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        await asyncio.sleep(0.1)
    raise AssertionError("no replica came back within 5 s")


async def test_messages_cannot_go_on_and_the_stream_says_what_was_lost(tmp_path: Path) -> None:
    fate = Fate(8)
    async with pair(tmp_path, (Chatty, Chatty), fate) as live:
        session = await live.session()
        events = await streamed(live, session, {"input": TEXT})
        turn = events[-1]["turn"]
        assert (events[-1]["type"], turn["error"]["code"]) == ("session.turn.incomplete", "upstream_lost")
        assert (turn["error"]["partial"], joined(events, "output_text")) == (True, "zwölf ")
        (stored,) = await live.turns(session)
        assert (stored["status"], stored["output"][0]["content"][0]["text"]) == ("incomplete", "zwölf ")
        fate.times = 1
        await well(live)
        chunks = await chat_chunks(live, TEXT)
        assert chunks[-1]["error"] | {"message": ""} == {
            "type": "upstream_error", "code": "upstream_lost", "message": "", "partial": True,
        }  # fmt: skip
        fate.times = 1
        await well(live)
        answer = await live.chat([{"role": "user", "content": TEXT}])
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_lost")


async def test_what_a_replica_could_not_go_on_with_exactly_is_not_begun_there(tmp_path: Path) -> None:
    async with pair(tmp_path, (Foreign, Foreign), Fate(5)) as live:
        session = await live.session()
        events = await streamed(live, session, {"input": TEXT, "frequency_penalty": 0.5})
        error = events[-1]["turn"]["error"]
        assert (error["code"], ": it would count penalties anew" in error["message"]) == ("upstream_lost", True)


async def test_a_rate_limit_is_passed_on_where_no_other_replica_is_and_rests_nobody(tmp_path: Path) -> None:
    engines = {name: Limited(name=name, left=1) for name in "ab"}
    async with live_gateway(tmp_path, engines) as live:
        session = await live.session()
        refused = await live.turn(session, TEXT, headers={"idempotency-key": "k"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert [turn["status"] for turn in await live.turns(session)] == ["failed"]
        assert all(replica.state == "ready" for replica in live.app.state.gateway.fleet)
        answered = (await live.turn(session, TEXT, headers={"idempotency-key": "k"})).json()
        assert (answered["status"], len(await live.turns(session))) == ("completed", 1)
        for engine in engines.values():
            engine.left = 0
        engines[answered["placement"]["replica"]].left = 1
        other = (await live.turn(session, "on")).json()
        assert (other["status"], other["placement"]["reason"]) == ("completed", "failover")


async def test_a_cancel_during_the_switch_stops_it(tmp_path: Path) -> None:
    fate = Fate(6)
    engines: dict[str, Engine] = {name: Halting(name=name, fate=fate) for name in "ab"}
    async with live_gateway(tmp_path, engines) as live:
        session = await live.session()
        asked = asyncio.create_task(streamed(live, session, {"input": TEXT}))
        while not fate.halted:  # noqa: ASYNC110 - set by the engine that was asked to go on
            await asyncio.sleep(0.01)
        assert (await live.client.post(f"/v1/sessions/{session}/turns/1/cancel")).status_code == 202
        events = await asyncio.wait_for(asked, 1)
        turn = events[-1]["turn"]
        assert (turn["status"], turn["finish_reason"]) == ("incomplete", "cancelled")
        assert joined(events, "output_text") == "zwölf"
        assert fate.halted == 0
        (stored,) = await live.turns(session, include="token_ids")
        assert stored["tokens"]["output_ids"] == IDS[:6]


async def test_a_smaller_window_takes_it_where_nothing_else_is_left(tmp_path: Path) -> None:
    async with pair(tmp_path, (Mortal, Mortal), Fate(5), window=80) as live:
        session = await live.session()
        turn = (await streamed(live, session, {"input": TEXT}))[-1]["turn"]
        assert turn["metadata"]["max_tokens"] == 80 - turn["usage"]["prompt_tokens"]


# ---------------------------------------------------------------- on the wire


@asynccontextmanager
async def on_the_wire(folder: Path, **settings: Any) -> AsyncIterator[tuple[Live, list[Subject], Halt]]:
    """Two of our engine's fronts, each behind a layer that rewrites what it sends. A `Halt` stops one in its course."""
    timeouts = Timeouts(connect_s=1.0, first_delta_s=0.4, idle_s=0.4, total_s=10.0, probe_s=2.0)
    halt = Halt()
    async with AsyncExitStack() as stack:
        subjects = [
            await stack.enter_async_context(
                turnkeep(timeouts=timeouts, chunk_tokens=1, tokens_per_s=400, sleep=halt.sleep)
            )
            for _ in range(2)
        ]
        for subject, name in zip(subjects, "ab", strict=True):
            cast(TurnkeepEngine, subject.engine)._upstream.name = name
        engines = {subject.engine.name: subject.engine for subject in subjects}
        yield await stack.enter_async_context(live_gateway(folder, engines, **settings)), subjects, halt


class Halt:
    """Sleeps for the engines, and does not wake up at one sleep."""

    def __init__(self) -> None:
        self.at = 0  # sleeps from now; 0: none

    async def sleep(self, seconds: float) -> None:
        self.at -= 1
        if self.at == 0:
            await asyncio.Event().wait()
        await asyncio.sleep(seconds)


def once(number: int, instead: bytes | None) -> Mangle:
    """Chunk `number` of the first answer that has one becomes something else; None: its connection breaks."""
    spent = False

    def mangle(at: int, chunk: bytes) -> list[bytes]:
        nonlocal spent
        if spent or at != number:
            return [chunk]
        spent = True
        if instead is None:
            raise ConnectionError("the connection breaks, as it was told to")
        return [instead]

    return mangle


MALFORMED = {
    "half JSON": b'data: {"ids": [1\n\n',
    "no object": b"data: [1]\n\n",
    "wrong types": b'data: {"ids": "no", "text": 5}\n\n',
    "an error": b'data: {"error": {"code": "engine_dead", "message": "gone"}}\n\n',
    "an early end": b"data: [DONE]\n\n",
    "not UTF-8": b'data: {"ids": [1], "text": "\xff"}\n\n',
    "HTML": b"<html>\n\ndata: <b>bad gateway</b>\n\n",
}


async def test_silence_a_break_and_malformed_bytes_in_mid_stream_cost_nothing_but_time(tmp_path: Path) -> None:
    async with on_the_wire(tmp_path) as (live, subjects, halt):
        faults = {"silence": None, "a break": None, **MALFORMED}
        for at, (name, instead) in enumerate(faults.items(), 6):
            halt.at = at if name == "silence" else 0
            mangle = once(at, instead) if name != "silence" else None
            for subject in subjects:
                assert subject.layer is not None
                subject.layer.mangle = mangle
            await well(live)
            session = await live.session()
            events = await streamed(live, session, {"input": TEXT})
            turn = events[-1]["turn"]
            assert (turn["status"], joined(events, "output_text")) == ("completed", TEXT), name
            (move,) = turn["metadata"]["continued"]
            assert 1 <= move["at_tokens"] <= at, name
            reasons = {"silence": "silent", "a break": "lost", "an error": "lost", "an early end": "lost"}
            assert move["reason"] == reasons.get(name, "malformed"), name


async def test_ids_that_are_no_tokens_never_enter_a_path(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"a": Forger(name="a", fate=Fate(4))}) as live:
        session = await live.session()
        broken = await live.turn(session, TEXT)
        assert (broken.status_code, broken.json()["error"]["code"]) == (502, "upstream_lost")
        after = (await live.turn(session, "and on")).json()
        assert (after["status"], after["output"][0]["content"][0]["text"]) == ("completed", "and on")


async def test_an_answer_goes_on_elsewhere_without_the_ids_that_are_no_tokens(tmp_path: Path) -> None:
    fate = Fate(4)
    engines: dict[str, Engine] = {name: Forger(name=name, fate=fate) for name in "ab"}
    async with live_gateway(tmp_path, engines) as live:
        told = (await live.turn(await live.session(), TEXT)).json()
        (move,) = told["metadata"]["continued"]
        assert (move["at_tokens"], move["reason"]) == (3, "malformed")
        assert (told["status"], told["output"][0]["content"][0]["text"]) == ("completed", TEXT)


async def test_a_turn_that_breaks_every_replica_takes_none_from_the_others(tmp_path: Path) -> None:
    engines: dict[str, Engine] = {name: Fragile(name=name) for name in "ab"}
    async with live_gateway(tmp_path, engines) as live:
        for _ in range(2 * FAILURES_TO_OPEN):
            broken = await live.chat([{"role": "user", "content": "poison"}])
            assert (broken.status_code, broken.json()["error"]["code"]) == (502, "upstream_broken")
        assert {replica.state for replica in live.app.state.gateway.fleet} == {"ready"}
        assert (await live.chat([{"role": "user", "content": "bread"}])).status_code == 200
