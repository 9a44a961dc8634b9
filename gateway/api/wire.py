"""HTTP/1.1 as bytes: what the server refuses before a request is one, in the same shape as every other error.

uvicorn's httptools protocol bounds neither the size of headers nor the time they take, and answers bytes that are no
HTTP with plain text. Here headers are at most 32 KiB and 100 lines (431), come within `headers_s` (408, and the
connection closes), and what cannot be parsed, two lengths or a length beside chunks, is 400. Knows no route.
"""

from __future__ import annotations

import asyncio
import sys
import time

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway.api.problems import error_json
from gateway.errors import BadRequest, GatewayError, TooSlow
from gateway.ids import id_maker

MAX_HEADER_BYTES = 32_768  # request line included
MAX_HEADERS = 100
HEADERS_S = 15.0


class HeadersTooLarge(GatewayError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class BoundedHttp(HttpToolsProtocol):
    """For `uvicorn.Config(http=BoundedHttp)`."""

    headers_s = HEADERS_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._refused = False
        self._in_headers = True
        self._raw_bytes = 0  # came since the headers began; httptools keeps a line to itself until it is whole
        self._header_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(self.headers_s, self._too_slow)

    def _headers_came(self) -> None:
        self._in_headers = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        if self._raw_bytes:
            self._refuse(TooSlow(f"the headers did not come within {self.headers_s:g} s"))
        elif not self.transport.is_closing():
            self.transport.close()  # nothing was said

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers and self._raw_bytes > MAX_HEADER_BYTES:
            self._refuse(_too_many_bytes())
            return
        self._raw_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._in_headers = True
        if self._deadline is None:
            self._raw_bytes = 1
            self._expect_headers()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > MAX_HEADERS:
            raise HeadersTooLarge(f"the request has more than {MAX_HEADERS} headers")

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _too_many_bytes()

    def on_headers_complete(self) -> None:
        self._headers_came()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What httptools could not parse, or one of our callbacks refused."""
        raised = sys.exception()
        cause = raised.__context__ if raised is not None else None
        told = BadRequest("this is not an HTTP request that can be understood", code="invalid_http")
        self._refuse(cause if isinstance(cause, HeadersTooLarge) else told)

    def _refuse(self, error: GatewayError) -> None:
        self._refused = True
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            request_id = id_maker(time.time)("req")
            body = orjson.dumps(error_json(error, request_id))
            lines = (
                b"content-type: application/json",
                b"content-length: %d" % len(body),
                b"x-request-id: " + request_id.encode(),
                b"connection: close",
            )
            self.transport.write(STATUS_LINE[error.status] + b"\r\n".join(lines) + b"\r\n\r\n" + body)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def _too_many_bytes() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request line and headers have more than {MAX_HEADER_BYTES} bytes")
