"""What only llama.cpp's adapter does: slots for salts, ids that the server leaves out, ends that it does not know."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.contract import (
    ChatPrompt,
    Delta,
    EngineError,
    EngineUnreachable,
    GenerateRequest,
    IdsPrompt,
    Sampling,
    Unsupported,
)
from engines.echo import EchoEngine
from engines.echo_tokens import IM_END, encode, pack
from engines.remote.http import Upstream
from engines.remote.llamacpp import LlamaCppEngine, session_of
from engines.remote.llamacpp_events import CompletionReader
from engines.remote.refusal import engine_error, read_complaint
from engines.remote.slots import SlotTable
from engines.remote.stops import StopWatch
from tests.contracts import llamacpp_app
from tests.contracts.live import LiveServer
from tests.contracts.subjects import chatml

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(behind: EchoEngine, **app: Any) -> AsyncIterator[LlamaCppEngine]:
    with LiveServer(llamacpp_app.create_app(behind, **app)) as server:
        engine = LlamaCppEngine(Upstream(server.url, name="llama"))
        await engine.capabilities()
        try:
            yield engine
        finally:
            await engine.aclose()


def ask(text: str, *, salt: str = "", session: str | None = None, **sampling: Any) -> GenerateRequest:
    packed = pack(encode(chatml(text)))

    async def whole() -> bytes:
        return packed

    prompt = IdsPrompt(packed, len(packed) // 4, whole, session)
    return GenerateRequest("r", "echo", prompt, Sampling(64, **sampling), salt)


async def answer(engine: LlamaCppEngine, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(request)]


async def test_ids_of_a_character_that_the_server_leaves_out_are_completed() -> None:
    async with served(EchoEngine()) as engine:
        deltas = await answer(engine, ask("a世界😀"))
    assert [id for delta in deltas for id in delta.ids] == [*"a世界😀".encode(), IM_END]
    assert "".join(delta.text for delta in deltas) == "a世界😀"


async def test_progress_tells_an_id_that_was_never_generated() -> None:
    reader = CompletionReader()
    event = {"content": "", "tokens": [0], "stop": False, "tokens_predicted": 0, "prompt_progress": {"total": 9}}
    assert reader.missing(event) == 0
    assert reader.read(event, event["tokens"]) is None  # type: ignore[arg-type]


async def test_ids_that_were_told_twice_are_no_protocol() -> None:
    with pytest.raises(ValueError, match="make no 1"):
        CompletionReader().missing({"content": "ab", "tokens": [1, 2], "stop": False, "tokens_predicted": 1})


async def test_a_stop_id_that_its_file_does_not_know_ends_the_answer_here() -> None:
    behind = EchoEngine(chunk_tokens=1)
    async with served(behind) as engine:
        deltas = await answer(engine, ask("ab|cdef", stop_token_ids=(ord("|"),)))
        for _ in range(500):  # the server learns of it when the connection has closed
            if (await behind.load()).running == 0:
                break
            await asyncio.sleep(0.02)
        assert (await behind.load()).running == 0
    assert "".join(delta.text for delta in deltas) == "ab"
    assert [id for delta in deltas for id in delta.ids] == [*b"ab|"]
    assert deltas[-1].finish == "stop"


async def test_two_tenants_share_no_prefix_and_a_session_comes_back_to_its_slot() -> None:
    asked: list[dict[str, Any]] = []
    async with served(EchoEngine(), asked=asked) as engine:
        for salt, session in (("A", "s1"), ("B", "s2"), ("A", "s1"), ("A", "s3"), ("B", "s2")):
            await answer(engine, ask("x", salt=salt, session=session))
    assert [(body["id_slot"], body["cache_prompt"]) for body in asked] == [
        (0, False), (1, False), (0, True), (2, False), (1, True),
    ]  # fmt: skip


def test_messages_come_back_to_the_slot_of_the_conversation_that_began_alike() -> None:
    def asked(*said: str) -> GenerateRequest:
        roles = ("system", "user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        return GenerateRequest("r", "m", ChatPrompt(messages), Sampling(1))

    first = session_of(asked("be brief", "hello"))
    assert first is not None
    assert session_of(asked("be brief", "hello", "hi", "more")) == first
    assert session_of(asked("be brief", "good day")) != first
    assert session_of(replace(ask("x", session="s"), priority=1)) == "s"


async def test_a_server_that_tells_no_slots_reuses_nothing_between_tenants() -> None:
    asked: list[dict[str, Any]] = []
    with LiveServer(llamacpp_app.create_app(EchoEngine(), asked=asked)) as server:
        engine = LlamaCppEngine(Upstream(server.url))
        await answer(engine, ask("x", salt="A"))
        await engine.aclose()
    assert (asked[0]["cache_prompt"], "id_slot" in asked[0]) == (False, False)


async def test_a_server_that_was_started_anew_has_slots_of_nobody() -> None:
    asked: list[dict[str, Any]] = []
    behind = EchoEngine(epoch="one")
    async with served(behind, asked=asked) as engine:
        await answer(engine, ask("x", salt="A", session="s"))
        before = (await engine.capabilities()).epoch
        behind._epoch = "two"
        assert (await engine.capabilities()).epoch != before
        await answer(engine, ask("x", salt="A", session="s"))
    assert [body["cache_prompt"] for body in asked] == [False, False]


async def test_forgetting_fills_the_slot_where_none_is_erased() -> None:
    asked: list[dict[str, Any]] = []
    async with served(EchoEngine(), asked=asked) as engine:
        await answer(engine, ask("a secret", salt="A", session="s"))
        await engine.forget("s", "A")
        await answer(engine, ask("x", salt="A", session="s"))
    assert (asked[1]["prompt"], asked[1]["id_slot"], asked[1]["cache_prompt"]) == ([0], 0, False)
    assert not asked[2]["cache_prompt"]


async def test_load_is_counted_by_slots_where_metrics_are_off() -> None:
    async with served(EchoEngine(chunk_tokens=1, tokens_per_s=50), metrics=False) as engine:
        assert "metrics" in (await engine.capabilities()).unseen
        stream = engine.generate(ask("x" * 40))
        await anext(stream)
        assert (await engine.load()).running == 1
        await stream.aclose()


async def test_what_it_can_do_is_probed() -> None:
    async with served(EchoEngine(window=2048)) as engine:
        found = await engine.capabilities()
    assert (found.kind, found.window, found.max_running, found.prefills) == ("llamacpp", 2048, llamacpp_app.SLOTS, True)
    assert found.routes == {"/v1/completions"}
    assert not found.takes_images
    assert not found.takes_salt
    assert {"tokenizer", "cache_salt"} <= set(found.unseen)


async def test_a_model_that_is_loading_is_not_there_and_what_it_was_not_started_with_is_unsupported() -> None:
    loading = b'{"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}'
    absent = b'{"error": {"code": 501, "message": "does not support embeddings", "type": "not_supported_error"}}'
    assert type(engine_error(503, read_complaint(loading), replica="r")) is EngineUnreachable
    assert type(engine_error(501, read_complaint(absent), replica="r")) is Unsupported


@given(
    requests=st.lists(st.tuples(st.sampled_from("AB"), st.sampled_from(["s", "t", None]), st.booleans()), max_size=40),
    slots=st.integers(1, 4),
)
def test_nothing_is_ever_reused_under_another_salt(requests: list[tuple[str, str | None, bool]], slots: int) -> None:
    table = SlotTable(slots)
    held: dict[int, str] = {}
    running = []
    for salt, session, ends in requests:
        seat = table.take(salt, session)
        assert seat.fresh or held[seat.slot] == salt
        held[seat.slot] = salt
        running.append(seat)
        if ends:
            table.give_back(running.pop(0))
    assert table.running == len(running)


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_is_found_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    watch, out = StopWatch(stops), ""
    at = 0
    while at < len(text) and watch.matched is None:
        step = data.draw(st.integers(1, 4))
        out += watch.push(text[at : at + step])
        at += step
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    if watch.matched is None:
        assert not found
        assert out + watch.rest() == text
    else:
        assert text[: len(out)] == out
        assert text[len(out) :].startswith(watch.matched)
        assert watch.push("more") == ""


async def test_an_error_in_mid_answer_gives_the_slot_back() -> None:
    async with served(EchoEngine(die_after=2, die_times=1)) as engine:
        with pytest.raises(EngineError):
            await answer(engine, replace(ask("hello there, friend"), cache_salt="A"))
        assert engine._slots is not None
        assert engine._slots.running == 0
