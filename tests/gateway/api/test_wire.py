"""Raw bytes on the socket, sizes and pauses: what httpx would never send, and what must not cost memory or time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import orjson
import psutil
import pytest

from gateway.api.wire import MAX_HEADER_BYTES, MAX_HEADERS, BoundedHttp
from tests.gateway.api.bodies import MESSAGES, ROUTES, Route, name
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, loop_turns, served

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundedHttp, "headers_s", 0.6)
        with served(tmp_path_factory.mktemp("wire"), body_timeout_s=0.6) as running:
            running.session(id="base")
            running.turn("base", "hello")
            yield running


def said(gateway: Served, *pieces: bytes, pause_s: float = 0.0) -> httpx.Response | None:
    """The answer to these bytes; None where the connection ended without one."""
    with socket.create_connection(gateway.address, timeout=10) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        answer = b""
        while b"\r\n\r\n" not in answer and (more := connection.recv(65_536)):
            answer += more
        if not answer:
            return None
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        while len(body) < int(headers.get("content-length", 0)) and (more := connection.recv(65_536)):
            body += more
    return httpx.Response(int(lines[0].split()[1]), headers=headers, content=body)


CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n"
BYTES: dict[str, tuple[bytes, int, str]] = {
    "two lengths": (CHAT + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", 400, "invalid_http"),
    "length and chunks": (
        CHAT + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        400,
        "invalid_http",
    ),
    "chunks and length": (
        CHAT + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        400,
        "invalid_http",
    ),
    "chunked twice hidden": (CHAT + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    "negative length": (CHAT + b"content-length: -2\r\n\r\n{}", 400, "invalid_http"),
    "endless length": (CHAT + b"content-length: " + b"9" * 40 + b"\r\n\r\n{}", 400, "invalid_http"),
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
    "line feed in a header": (GET + b"x-session-id: a\nb: c\r\n\r\n", 400, "invalid_http"),
    "nul in a header": (GET + b"x-session-id: a\x00b\r\n\r\n", 400, "invalid_http"),
    "a space before the colon": (GET + b"x-session-id : a\r\n\r\n", 400, "invalid_http"),
    "64 KB header": (GET + b"x-a: " + b"a" * 65_536 + b"\r\n\r\n", 431, "headers_too_large"),
    "64 KB path": (b"GET /" + b"a" * 65_536 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 431, "headers_too_large"),
    "1000 headers": (
        GET + b"".join(b"x-%d: 1\r\n" % i for i in range(1000)) + b"\r\n",
        431,
        "headers_too_large",
    ),
    "a host with a path": (b"GET /v1/models HTTP/1.1\r\nhost: x/?\r\n\r\n", 400, "invalid_host"),
    "a host with a user": (b"GET /v1/models HTTP/1.1\r\nhost: a@127.0.0.1\r\n\r\n", 400, "invalid_host"),
    "two hosts": (b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nhost: x\r\n\r\n", 400, "invalid_host"),
    "another name, auth off": (b"GET /v1/models HTTP/1.1\r\nhost: example.org\r\n\r\n", 403, "host_not_allowed"),
    "a page of another origin": (GET + b"origin: https://example.org\r\n\r\n", 403, "origin_not_allowed"),
    "an opaque origin": (GET + b"origin: null\r\n\r\n", 403, "origin_not_allowed"),
    "a key of another alphabet": (
        CHAT
        + b"x-session-id: a\xc3\xa9\r\ncontent-length: %d\r\n\r\n%s"
        % (len(ROUTES[0].with_fields()), ROUTES[0].with_fields().encode()),
        400,
        "invalid_session_key",
    ),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_that_are_no_good_request(gateway: Served, case: str) -> None:
    sent, status, code = BYTES[case]
    with nothing_saved(gateway):
        answer = said(gateway, sent)
        assert answer is not None
        refused(answer, status, code)


ODD_PATHS = (
    "/v1/../admin",
    "//admin",
    "/%2e%2e/admin",
    "/v1/%2e%2e/admin/v1/snapshot",
    "/v1//models",
    "/admin/../v1/models",
    "/v1/models%00",
    "/v1/models/",
    "/admin/..%2fapp.py",
    "/admin/%2e%2e%2f%2e%2e%2fapp.py",
    "/v1/sessions/%00",
    "/v1/sessions/%ED%A0%80",
    "/v1/sessions/a%0d%0ab",
    "/v1/sessions/..%2f..",
    "/v1/sessions/base/turns/%00",
    "/v1/sessions/base/turns/" + "9" * 5000,
)


@pytest.mark.parametrize("path", ODD_PATHS, ids=lambda path: path[:40])
def test_odd_paths_reach_no_other_route(gateway: Served, path: str) -> None:
    answer = said(gateway, f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    assert answer is not None
    refused(answer, 404)


def test_headers_within_the_bounds_are_read(gateway: Served) -> None:
    many = b"".join(b"x-%d: 1\r\n" % i for i in range(MAX_HEADERS - 1))
    assert said(gateway, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + many + b"\r\n").status_code == 200  # type: ignore[union-attr]
    long = b"x: " + b"a" * (MAX_HEADER_BYTES - 200)
    assert said(gateway, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + long + b"\r\n\r\n").status_code == 200  # type: ignore[union-attr]


def test_a_header_that_never_ends_is_not_kept(gateway: Served) -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises((ConnectionError, BrokenPipeError)):
        said(gateway, GET + b"x: ", *[b"a" * MIB] * 64)
    assert psutil.Process().memory_info().rss - before < 32 * MIB


def test_what_pauses_is_given_up(gateway: Served) -> None:
    with nothing_saved(gateway):
        refused(said(gateway, GET + b"x: a") or httpx.Response(599), 408, "request_timeout")
        refused(said(gateway, CHAT + b"content-length: 100\r\n\r\n{") or httpx.Response(599), 408, "request_timeout")
        slowly = [b"1\r\n \r\n"] * 12
        answer = said(gateway, CHAT + b"transfer-encoding: chunked\r\n\r\n", *slowly, pause_s=0.1)
        refused(answer or httpx.Response(599), 408, "request_timeout")
        assert said(gateway, b"") is None


def pieces(size: int) -> Iterator[bytes]:
    for _ in range(size // MIB):
        yield b" " * MIB


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_100_mb_are_refused_while_they_come(gateway: Served, route: Route) -> None:
    before = psutil.Process().memory_info().rss
    head = (
        f"{route.method} {route.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nif-match: *\r\n"
    )
    with nothing_saved(gateway):
        announced = said(gateway, head.encode() + b"content-length: 104857600\r\n\r\n")
        refused(announced or httpx.Response(599), 413, "request_too_large")
        chunks = [b"%x\r\n" % MIB + b" " * MIB + b"\r\n"] * 21
        streamed = said(gateway, head.encode() + b"transfer-encoding: chunked\r\n\r\n", *chunks)
        refused(streamed or httpx.Response(599), 413, "request_too_large")
    assert psutil.Process().memory_info().rss - before < 80 * MIB


def test_a_client_that_leaves_within_its_body_leaves_nothing(gateway: Served) -> None:
    with nothing_saved(gateway):
        for cut in (1, 20, 60):
            with socket.create_connection(gateway.address) as connection:
                connection.sendall(CHAT + b"content-length: 100\r\n\r\n" + b'{"model":"echo","messages":[{}]}'[:cut])
        time.sleep(0.1)


def test_a_body_in_chunks_of_one_byte_is_read(gateway: Served) -> None:
    body = ROUTES[0].with_fields().encode()
    answer = gateway.client.post(
        "/v1/chat/completions", content=(bytes([b]) for b in body), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200


LONG = {"a": "a" * MIB, "spaces": " " * MIB, "newlines": "\n" * MIB, "a character of three bytes": "語" * (MIB // 3)}


@pytest.mark.parametrize("route", MESSAGES, ids=name)
def test_a_megabyte_of_text_does_not_hold_the_loop(gateway: Served, route: Route) -> None:
    with nothing_saved(gateway):
        for text in LONG.values():
            with loop_turns(gateway.url):
                answer = route.send(gateway, route.with_text(orjson.dumps(text).decode()))
            assert refused(answer, 400, "context_length_exceeded")["details"]["limit"] == 131_072


def test_twenty_megabytes_are_too_many_to_tokenize(gateway: Served) -> None:
    with nothing_saved(gateway), loop_turns(gateway.url, within_s=0.5):
        answer = ROUTES[0].send(gateway, ROUTES[0].with_text(f'"{"a" * 19 * MIB}"'))
        refused(answer, 413, "request_too_large")
