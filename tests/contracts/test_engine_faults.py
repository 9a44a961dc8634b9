# ruff: noqa: E501 - tables, one case a line
"""What the adapters make of a network and a server that fail: real sockets, a fault proxy, mangled answers."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from engines.contract import (
    ContextOverflow,
    Delta,
    EngineBroken,
    EngineError,
    EngineLost,
    EngineOverloaded,
    EngineTimeout,
    EngineUnreachable,
    RequestRefused,
)
from tests.contracts.live import Canned, Mangle
from tests.contracts.subjects import QUICK, SOCKETS, Subject
from tests.contracts.test_engine_contract import collect, nothing_is_left_running, text_of, until_running
from tests.faults.proxy import Cut, Drip, Pass, Refuse, Stall

__all__ = ["nothing_is_left_running"]
pytestmark = pytest.mark.anyio
TEXT = "what is said back, long enough for several deltas"
HASTE = replace(QUICK, first_delta_s=0.3, idle_s=0.3)


# What these read is read by others here: sglang_ids in other steps, and OpenAI's chunks.
ALIKE = {"sglang_steps", "sglang_chat", "llamacpp_chat", "turnkeep_as_vllm"}


@pytest.fixture(params=sorted(SOCKETS.keys() - ALIKE))
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return cast(Callable[..., Any], SOCKETS[request.param])


async def collect_until_error(subject: Subject) -> tuple[list[Delta], EngineError | None]:
    deltas: list[Delta] = []
    try:
        async for delta in subject.engine.generate(subject.ask(TEXT)):
            deltas.append(delta)  # noqa: PERF401 - what came before the error is kept
    except EngineError as error:
        return deltas, error
    return deltas, None


def faults(subject: Subject) -> Any:
    assert subject.proxy is not None
    return subject.proxy


def mangle(subject: Subject, how: Mangle | None) -> None:
    assert subject.layer is not None
    subject.layer.mangle = how


def can(subject: Subject, status: int = 200, body: bytes | tuple[bytes, ...] = b"", kind: str = "application/json",
        **headers: str) -> None:  # fmt: skip
    assert subject.layer is not None
    chunks = (body,) if isinstance(body, bytes) else body
    subject.layer.canned = Canned(status, kind, chunks, tuple((k.replace("_", "-"), v) for k, v in headers.items()))


async def test_a_refused_connection_is_unreachable_at_once(make: Callable[..., Any]) -> None:
    async with make() as subject:
        await faults(subject).__aexit__(None, None, None)
        started = time.monotonic()
        deltas, error = await collect_until_error(subject)
        assert not deltas
        assert isinstance(error, EngineUnreachable)
        assert error.retryable
        assert time.monotonic() - started < QUICK.connect_s
        await faults(subject).__aenter__()


async def test_a_connection_that_is_reset_at_once_is_unreachable(make: Callable[..., Any]) -> None:
    async with make() as subject:
        faults(subject).fault = Refuse()
        _, error = await collect_until_error(subject)
        assert type(error) is EngineUnreachable
        assert faults(subject).accepted == 2  # once more, in case it was only an idle connection that had gone


async def test_silence_before_the_first_delta_times_out(make: Callable[..., Any]) -> None:
    async with make(timeouts=HASTE) as subject:
        faults(subject).fault = Stall()
        started = time.monotonic()
        deltas, error = await collect_until_error(subject)
        assert not deltas
        assert isinstance(error, EngineTimeout)
        assert (error.stage, error.retryable) == ("first_delta", True)
        assert 0.25 < time.monotonic() - started < 3.0


async def test_headers_alone_are_no_first_delta(make: Callable[..., Any]) -> None:
    async with make(timeouts=HASTE) as subject:
        mangle(subject, lambda number, chunk: [b": ping\n\n"])
        deltas, error = await collect_until_error(subject)
        assert not deltas
        assert isinstance(error, EngineTimeout | EngineUnreachable)


async def test_silence_between_deltas_times_out_and_is_not_retryable(make: Callable[..., Any]) -> None:
    async with make(timeouts=HASTE, chunk_tokens=1, tokens_per_s=200) as subject:
        faults(subject).fault = Stall(after_bytes=700)
        deltas, error = await collect_until_error(subject)
        assert deltas
        assert isinstance(error, EngineTimeout)
        assert (error.stage, error.retryable) == ("idle", False)


async def test_background_work_may_pause_for_longer_than_a_turn_may(make: Callable[..., Any]) -> None:
    async with make(timeouts=HASTE, chunk_tokens=4, tokens_per_s=9) as subject:
        with pytest.raises(EngineTimeout):
            await collect(subject, subject.ask("abcdefg"))
        assert text_of(await collect(subject, replace(subject.ask("abcdefg"), priority=1))) == "abcdefg"


async def test_a_drip_ends_with_the_total_limit(make: Callable[..., Any]) -> None:
    async with make(timeouts=replace(QUICK, total_s=1.0)) as subject:
        faults(subject).fault = Drip(bytes_per_s=300)
        started = time.monotonic()
        _, error = await collect_until_error(subject)
        assert isinstance(error, EngineTimeout)
        assert (error.stage, error.retryable) == ("total", False)
        assert time.monotonic() - started < 4.0


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("after_bytes", [0, 1, 60, 150, 400, 900, 1500, 2200])
async def test_a_cut_is_unreachable_before_the_first_delta_and_lost_after(
    make: Callable[..., Any], after_bytes: int, reset: bool
) -> None:
    async with make(chunk_tokens=2, tokens_per_s=2000) as subject:
        faults(subject).fault = Cut(after_bytes, reset)
        deltas, error = await collect_until_error(subject)
        assert TEXT.startswith(text_of(deltas))
        if error is None:  # only the tail after the finish reason was cut
            assert text_of(deltas) == TEXT
        elif deltas:
            assert type(error) is EngineLost
            assert not error.retryable
        else:
            assert isinstance(error, EngineUnreachable | EngineBroken)
            assert error.retryable
        faults(subject).fault = Pass()
        assert text_of(await collect(subject, subject.ask("again"))) == "again"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, EngineOverloaded), (503, EngineOverloaded), (500, EngineBroken), (502, EngineUnreachable), (401, EngineBroken),
     (504, EngineTimeout), (400, RequestRefused), (422, RequestRefused), (302, EngineBroken), (404, EngineBroken)],
)  # fmt: skip
async def test_a_status_has_its_error(make: Callable[..., Any], status: int, kind: type[EngineError]) -> None:
    async with make() as subject:
        can(
            subject,
            status,
            b'{"error": {"message": "no", "code": null}}',
            Retry_After="7",
            Location="http://127.0.0.1:1/",
        )
        _, error = await collect_until_error(subject)
        assert type(error) is kind
        assert error.replica == "replica"
        if isinstance(error, EngineOverloaded):
            assert error.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("chunks", "content_type", "kind"),
    [
        ((b'data: {"id": "x", \n\n',), "text/event-stream", EngineBroken),
        ((b"data: [1, 2]\n\n",), "text/event-stream", EngineBroken),
        ((b'data: {"choices": 3, "ids": 3, "text": ""}\n\n',), "text/event-stream", EngineBroken),
        ((b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "so"}], "ids": [], "text": "", "finish": "so"}\n\n',),
         "text/event-stream", EngineBroken),
        ((b"data: \xff\xfe\n\n",), "text/event-stream", EngineBroken),
        ((b"no field at all\n\n",), "text/event-stream", EngineUnreachable),
        ((), "text/event-stream", EngineUnreachable),
        ((b"data: [DONE]\n\n",), "text/event-stream", EngineUnreachable),
        ((b"data: " + b"x" * 9_000_000 + b"\n\n",), "text/event-stream", EngineBroken),
        ((b"x" * 100_000,) * 100, "text/event-stream", EngineBroken),
        ((b"<html>welcome</html>",), "text/html", EngineBroken),
        ((b'{"error": {"message": "maximum context length is 10 tokens, you requested 20 tokens", "code": 400}}',),
         "application/json", ContextOverflow),
        ((b'data: {"error": {"message": "too long", "type": "exceed_context_size_error", "code": 400, "n_ctx": 1}}\n\n',),
         "text/event-stream", ContextOverflow),
        ((b'data: {"error": {"message": "slow down", "code": 429}}\n\n',), "text/event-stream", EngineOverloaded),
    ],
    ids=["half JSON", "no object", "wrong types", "unknown finish", "not UTF-8", "no field", "empty", "only DONE",
         "one large event", "no line end", "HTML", "JSON error with 200", "overflow in the stream", "429 in the stream"],
)  # fmt: skip
async def test_what_is_not_the_protocol_is_a_typed_error(
    make: Callable[..., Any], chunks: tuple[bytes, ...], content_type: str, kind: type[EngineError]
) -> None:
    async with make() as subject:
        can(subject, 200, chunks, content_type)
        deltas, error = await collect_until_error(subject)
        assert not deltas
        assert type(error) is kind


async def test_a_compressed_answer_is_refused(make: Callable[..., Any]) -> None:
    async with make() as subject:
        can(subject, 200, gzip.compress(b"data: {}\n\n"), "text/event-stream", Content_Encoding="gzip")
        _, error = await collect_until_error(subject)
        assert type(error) is EngineBroken


def per_byte(number: int, chunk: bytes) -> list[bytes]:
    return [bytes((byte,)) for byte in chunk]


def crlf(number: int, chunk: bytes) -> list[bytes]:
    return [chunk.replace(b"\n", b"\r\n")]


def cr_with_comments(number: int, chunk: bytes) -> list[bytes]:
    return [b"\xef\xbb\xbf" if number == 0 else b"", b": ping\r\r", b"retry: 10\r", chunk.replace(b"\n", b"\r")]


def many_lines(number: int, chunk: bytes) -> list[bytes]:
    return [chunk.replace(b",", b"\ndata: ,")]


@pytest.mark.parametrize("how", [per_byte, crlf, cr_with_comments, many_lines])
async def test_any_framing_of_the_standard_reads_the_same(make: Callable[..., Any], how: Mangle) -> None:
    async with make() as subject:
        mangle(subject, how)
        assert text_of(await collect(subject, subject.ask("héllo 世界 😀; tail"))) == "héllo 世界 😀; tail"


async def test_half_json_after_a_delta_is_broken_and_not_retryable(make: Callable[..., Any]) -> None:
    async with make(tokens_per_s=400) as subject:
        mangle(subject, lambda number, chunk: [chunk if number < 5 else chunk[:20] + b"\n\n"])
        deltas, error = await collect_until_error(subject)
        assert deltas
        assert type(error) is EngineBroken
        assert not error.retryable


async def test_an_error_event_after_a_delta_is_lost(make: Callable[..., Any]) -> None:
    async with make(die_after=3, die_times=1) as subject:
        deltas, error = await collect_until_error(subject)
        assert text_of(deltas) == TEXT[:12]  # three deltas of the engine behind
        assert type(error) is EngineLost
        assert "told to die" in str(error)


async def test_an_end_without_a_finish_reason_is_lost(make: Callable[..., Any]) -> None:
    async with make(tokens_per_s=400) as subject:
        mangle(subject, lambda number, chunk: [chunk] if number < 4 else [b": gone\n\n"])
        deltas, error = await collect_until_error(subject)
        assert deltas
        assert type(error) is EngineLost


async def test_a_missing_done_after_the_finish_is_no_fault(make: Callable[..., Any]) -> None:
    async with make() as subject:
        mangle(subject, lambda number, chunk: [] if b"[DONE]" in chunk else [chunk])
        deltas = await collect(subject, subject.ask(TEXT))
        assert text_of(deltas) == TEXT
        assert deltas[-1].usage is not None


async def test_a_cancelled_caller_leaves_no_connection(make: Callable[..., Any]) -> None:
    async with make(chunk_tokens=1, tokens_per_s=50) as subject:
        task = asyncio.ensure_future(collect(subject, subject.ask(TEXT)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(0.5):
            while faults(subject).open_connections:  # noqa: ASYNC110 - the other end of a socket
                await asyncio.sleep(0.005)


async def test_a_hanging_replica_holds_up_no_other(make: Callable[..., Any]) -> None:
    async with make(timeouts=replace(QUICK, first_delta_s=1.0)) as hanging, make() as healthy:
        faults(hanging).fault = Stall()
        stuck = asyncio.ensure_future(collect_until_error(hanging))
        assert text_of(await collect(healthy, healthy.ask("ok"))) == "ok"
        assert not stuck.done()
        assert isinstance((await stuck)[1], EngineTimeout)


@pytest.mark.parametrize("kind", ["turnkeep", "vllm_ids"])
async def test_a_reader_that_stops_reading_stops_the_engine(kind: str) -> None:
    """Backpressure: what is buffered between the two is bounded, whatever the engine could say."""
    async with SOCKETS[kind](chunk_tokens=50, window=10_000_000) as subject:
        assert subject.layer is not None
        request = subject.ask("x" * 500_000, max_tokens=1_000_000, logprobs=20)
        answer = cast(Any, subject.engine.generate(request))
        await anext(answer)
        before, now = -1, 0
        async with asyncio.timeout(80):
            while now != before:
                await asyncio.sleep(0.5)
                before, now = now, subject.layer.sent_bytes
        assert now < 48 << 20  # of some 500 MB: the sockets' own buffers, and a little of ours
        await answer.aclose()
        await until_running(subject, 0)
