"""The one HTTP client: what it sends, what it bounds, what it refuses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from engines.contract import EngineBroken, EngineTimeout
from engines.remote.http import Timeouts, Upstream, parse_retry_after
from tests.contracts.live import LiveServer

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Starlette:
    async def headers(request: Request) -> Response:
        answer = JSONResponse(dict(request.headers))
        answer.set_cookie("left", "behind")
        return answer

    async def large(request: Request) -> Response:
        return Response(b"x" * 100_000)

    async def elsewhere(request: Request) -> Response:
        return RedirectResponse("/headers")

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    return Starlette(
        routes=[
            Route("/headers", headers),
            Route("/large", large),
            Route("/elsewhere", elsewhere),
            Route("/echo", echo, methods=["POST"]),
        ]
    )


async def test_only_our_own_headers_go_up(server: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with LiveServer(server) as live:
        upstream = Upstream(live.url, api_key="sk-own")
        for _ in range(2):  # the second time a cookie could come back
            reply = await upstream.get("/headers")
        await upstream.aclose()
    assert reply.body.count(b'":') == 5
    for line in (b'"authorization":"Bearer sk-own"', b'"accept-encoding":"identity"', b'"user-agent":"turnkeep"'):
        assert line in reply.body


async def test_a_redirect_is_an_answer_and_not_followed(server: Starlette) -> None:
    with LiveServer(server) as live:
        upstream = Upstream(live.url)
        assert (await upstream.get("/elsewhere")).status == 307
        await upstream.aclose()


async def test_a_whole_reply_is_bounded(server: Starlette) -> None:
    with LiveServer(server) as live:
        upstream = Upstream(live.url, max_body_bytes=50_000)
        with pytest.raises(EngineBroken, match="50000"):
            await upstream.get("/large")
        await upstream.aclose()


@pytest.mark.parametrize("size", [0, 1000, 5_000_000])
async def test_a_body_of_any_size_goes_up_whole(server: Starlette, size: int) -> None:
    with LiveServer(server) as live:
        upstream = Upstream(live.url)
        assert len((await upstream.post("/echo", b"x" * size)).body) == size
        await upstream.aclose()


@contextmanager
def full_queue() -> Iterator[int]:
    """Port of a listener on loopback that takes no further connection: its queue is full, so packets are dropped."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # more than the queue holds
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_connecting_has_its_own_limit() -> None:
    with full_queue() as port:
        upstream = Upstream(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect_s=0.2))
        try:
            with pytest.raises(EngineTimeout) as caught:
                await upstream.get("/")
        finally:
            await upstream.aclose()
    assert caught.value.stage == "connect"
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0),
        ("soon", None),
        ("", None),
        (None, None),
        ("inf", 86_400.0),
        ("1e300", 86_400.0),
        ("-1e999", 0.0),
        ("nan", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert parse_retry_after(value, now=10.0) == seconds
