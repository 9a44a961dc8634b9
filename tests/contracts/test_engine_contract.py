"""The engine contract: one suite over every engine that keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, cast

import pytest

from engines.contract import (
    Base,
    ContextOverflow,
    Delta,
    EngineError,
    EngineOverloaded,
    EngineUnreachable,
    GenerateRequest,
    Grammar,
    IdsPrompt,
    KvSource,
    RequestRefused,
    Sampling,
    Unsupported,
)
from engines.echo_tokens import encode, pack
from tests.contracts.subjects import MAKERS, SOCKETS, Subject, chatml

pytestmark = pytest.mark.anyio
TEXT = "héllo 世界 😀, this is said back"


@pytest.fixture(params=sorted(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return cast(Callable[..., Any], MAKERS[request.param])


@pytest.fixture(autouse=True)
async def nothing_is_left_running() -> AsyncIterator[None]:
    """No task outlives a test, whatever it did."""
    before = asyncio.all_tasks()
    yield
    await asyncio.sleep(0)
    left = [task for task in asyncio.all_tasks() - before if "TestRunner" not in repr(task.get_coro())]
    assert not left


async def collect(subject: Subject, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in subject.engine.generate(request)]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def until_running(subject: Subject, running: int, within_s: float = 1.0) -> None:
    """A request that its caller left has ended in the engine within a second."""
    async with asyncio.timeout(within_s):
        while (await subject.behind.load()).running != running:  # noqa: ASYNC110 - it lives in another thread
            await asyncio.sleep(0.005)


async def test_an_answer_comes_in_pieces_and_ends_with_finish_and_usage(make: Callable[..., Any]) -> None:
    async with make() as subject:
        deltas = await collect(subject, subject.ask(TEXT))
        assert text_of(deltas) == TEXT
        assert len(deltas) > 3
        assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish == "stop"
        usage = deltas[-1].usage
        assert usage is not None
        assert usage.output_tokens == len(TEXT.encode()) + 1
        assert usage.prompt_tokens > len(TEXT.encode())


async def test_ids_are_whole_where_the_engine_returns_them(make: Callable[..., Any]) -> None:
    async with make() as subject:
        found = await subject.engine.capabilities()
        returns_ids = found.returns_ids and (subject.ids or found.kind == "vllm")
        deltas = await collect(subject, subject.ask(TEXT))
        ids = [token for delta in deltas for token in delta.ids]
        assert ids == ([*TEXT.encode(), 258] if returns_ids else [])


async def test_no_delta_holds_half_a_character(make: Callable[..., Any]) -> None:
    async with make(chunk_tokens=1) as subject:
        deltas = await collect(subject, subject.ask("世界😀"))
        assert text_of(deltas) == "世界😀"
        assert "\ufffd" not in text_of(deltas)


async def test_the_same_request_has_the_same_answer(make: Callable[..., Any]) -> None:
    async with make() as subject:
        one, two = [text_of(await collect(subject, subject.ask(TEXT, seed=3))) for _ in range(2)]
        assert one == two


async def test_max_tokens_ends_an_answer(make: Callable[..., Any]) -> None:
    async with make() as subject:
        deltas = await collect(subject, subject.ask("abcdefgh", max_tokens=5))
        assert text_of(deltas) == "abcde"
        assert deltas[-1].finish == "length"
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.output_tokens == 5


async def test_a_stop_string_ends_an_answer_and_is_not_in_it(make: Callable[..., Any]) -> None:
    async with make() as subject:
        deltas = await collect(subject, subject.ask("one two three", stop=("zzz", "two")))
        assert text_of(deltas) == "one "
        assert deltas[-1].finish == "stop"


async def test_logprobs_come_for_every_token_where_the_engine_gives_them(make: Callable[..., Any]) -> None:
    async with make() as subject:
        if not (await subject.engine.capabilities()).max_logprobs:
            with pytest.raises(Unsupported):
                await collect(subject, subject.ask("abc", logprobs=2))
            return
        deltas = await collect(subject, subject.ask("abc", logprobs=2))
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert [entry.text for entry in entries][:3] == ["a", "b", "c"]
        assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in entries)


async def test_a_prompt_over_the_window_is_an_overflow_with_both_numbers(make: Callable[..., Any]) -> None:
    async with make(window=100) as subject:
        with pytest.raises(ContextOverflow) as caught:
            await collect(subject, subject.ask("x" * 200, max_tokens=10))
        assert caught.value.limit == 100
        assert caught.value.requested is not None
        assert caught.value.requested > 200
        assert not caught.value.retryable


async def test_a_model_that_is_not_there_is_refused(make: Callable[..., Any]) -> None:
    async with make() as subject:
        await subject.engine.capabilities()  # some servers answer whatever name they are given: the adapter knows
        with pytest.raises(RequestRefused) as caught:
            await collect(subject, subject.ask("x", model="no-such-model"))
        assert caught.value.code == "model_not_found"


async def test_a_grammar_that_it_cannot_follow_is_refused(make: Callable[..., Any]) -> None:
    async with make() as subject:
        with pytest.raises(RequestRefused):
            await collect(subject, subject.ask("x", grammar=Grammar("lark", 'start: "a"')))


async def test_a_full_replica_says_when_to_come_back(make: Callable[..., Any]) -> None:
    async with make(max_running=0) as subject:
        with pytest.raises(EngineOverloaded) as caught:
            await collect(subject, subject.ask("x"))
        assert caught.value.retry_after_s == subject.retry_after_s
        assert caught.value.retryable


@pytest.mark.parametrize("deltas", range(5))
async def test_closing_the_answer_cancels_it_in_the_engine(make: Callable[..., Any], deltas: int) -> None:
    async with make(chunk_tokens=1, tokens_per_s=100) as subject:
        answer = cast(AsyncGenerator[Delta, None], subject.engine.generate(subject.ask("x" * 200, max_tokens=300)))
        for _ in range(deltas):
            await anext(answer)
        await answer.aclose()
        await until_running(subject, 0)
        assert text_of(await collect(subject, subject.ask("ok"))) == "ok"


async def test_cancelling_before_the_first_delta_cancels_it_in_the_engine(make: Callable[..., Any]) -> None:
    async with make(prefill_tokens_per_s=10) as subject:
        waiting = asyncio.ensure_future(collect(subject, subject.ask("x" * 50)))
        await until_running(subject, 1, within_s=2.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until_running(subject, 0)


async def test_many_answers_at_once_do_not_mix(make: Callable[..., Any]) -> None:
    async with make(chunk_tokens=2) as subject:
        texts = [f"answer number {number} " * (number % 5 + 1) for number in range(24)]
        asked = [collect(subject, subject.ask(text, max_tokens=200)) for text in texts]
        assert [text_of(deltas) for deltas in await asyncio.gather(*asked)] == texts


async def test_a_slow_reader_gets_everything(make: Callable[..., Any]) -> None:
    async with make(chunk_tokens=1) as subject:
        got = ""
        async for delta in subject.engine.generate(subject.ask("slow " * 20, max_tokens=200)):
            got += delta.text
            await asyncio.sleep(0.005)
        assert got == "slow " * 20


async def test_capabilities_name_the_models_and_what_can_be_sent(make: Callable[..., Any]) -> None:
    async with make(window=4096) as subject:
        found = await subject.engine.capabilities()
        assert found.models == ("echo",)
        assert found.takes_ids if subject.ids else found.takes_chat
        assert found.window == 4096 or "window" in found.unseen


async def test_it_tells_what_its_cache_holds_just_where_its_capabilities_say_so(make: Callable[..., Any]) -> None:
    async with make() as subject:
        says = (await subject.engine.capabilities()).kv_events
        feed = subject.engine.kv_feed() if isinstance(subject.engine, KvSource) else None
        assert (feed is not None) == says


async def test_load_counts_what_runs(make: Callable[..., Any]) -> None:
    async with make(chunk_tokens=1, tokens_per_s=100) as subject:
        if {"load", "vllm:num_requests_running"} & set((await subject.engine.capabilities()).unseen):
            return
        assert (await subject.engine.load()).running == 0
        answer = cast(AsyncGenerator[Delta, None], subject.engine.generate(subject.ask("x" * 100, max_tokens=200)))
        await anext(answer)
        assert (await subject.engine.load()).running == 1
        await answer.aclose()


async def test_tokenize_reads_special_tokens_or_says_that_it_cannot(make: Callable[..., Any]) -> None:
    async with make() as subject:
        assert await subject.engine.tokenize("a<|im_end|>", model="echo") in ([97, 258], None)


async def test_forgetting_a_session_that_is_not_kept_is_no_error(make: Callable[..., Any]) -> None:
    async with make() as subject:
        await subject.engine.forget("no/such session", "salt")


@pytest.mark.parametrize("kind", sorted(SOCKETS))
async def test_a_closed_engine_can_be_reached_no_more(kind: str) -> None:
    async with SOCKETS[kind]() as subject:
        await collect(subject, subject.ask("x"))
        await subject.engine.aclose()
        with pytest.raises(EngineUnreachable):
            await collect(subject, subject.ask("x"))


async def test_a_connection_is_used_again(make: Callable[..., Any]) -> None:
    async with make() as subject:
        for _ in range(5):
            await collect(subject, subject.ask("x"))
        if subject.proxy is not None:
            assert subject.proxy.accepted == 1


async def test_every_failure_is_an_engine_error(make: Callable[..., Any]) -> None:
    async with make(fail_first=1, die_after=1, die_times=1) as subject:
        for _ in range(2):
            with pytest.raises(EngineError):
                await collect(subject, subject.ask("hello there"))
        assert text_of(await collect(subject, subject.ask("hello there"))) == "hello there"


async def test_a_replica_that_lost_its_paths_is_sent_the_whole_prompt(make: Callable[..., Any]) -> None:
    """A restarted one answers unknown_base; that costs a second request and never the turn."""
    async with make() as subject:
        if not subject.ids:
            pytest.skip("asks with messages: it has no base")
        whole = pack(encode(chatml(TEXT)))

        async def all_of_it() -> bytes:
            return whole

        prompt = IdsPrompt(whole[80:], len(whole) // 4, all_of_it, "a-session", Base(20, b"\x01" * 32))
        request = GenerateRequest("r-1", "echo", prompt, Sampling(64))
        assert text_of(await collect(subject, request)) == TEXT
