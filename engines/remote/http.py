"""One replica over HTTP. The only module that imports the HTTP client.

aiohttp directly: on two shared cores, 11 KB bodies, 16 at once, a request cost 0.21 ms of CPU and a streamed read
21 us, against 0.65 ms and 38 us for httpx on aiohttp's transport (`docs/engines.md` says how to measure).
aiohttp sets TCP_NODELAY itself.

What goes upstream is a list of allowed headers: content type, accept, our own credential, the request id. Nothing
of a client's request is ever forwarded. Redirects are not followed, the environment's proxies not read, cookies
not kept, bodies not decompressed (we ask for `identity` and refuse anything else).

    open ---------- headers ----- first delta ------- delta ------- delta ---- end
    | connect_s |
    | first_delta_s                          |
                                             |  idle_s, each wait              |
    | total_s                                                                  |

Knows no SSE and no engine's protocol.
"""

from __future__ import annotations

import asyncio
import errno
import io
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import aiohttp.abc

from engines.contract import EngineBroken, EngineTimeout, EngineUnreachable

RefuseAddress = Callable[[str], str | None]  # IP address -> why not; None: it may be connected to
JSON = "application/json"
KEEPALIVE_S = 4.0  # below the 5 s of uvicorn's default, so that the pool drops an idle connection before the server
RETRY_WITHIN_S = 0.5  # a pooled connection that the server had already closed fails at once
PIECE_BYTES = 1 << 18
MAX_RETRY_AFTER_S = 86_400.0
DRAIN_S = 0.1  # wait for the end of a finished response, so that its connection can be used again


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `first_delta_s` counts from the request, `idle_s` from one delta to the next."""

    connect_s: float = 3.0
    first_delta_s: float = 300.0
    idle_s: float = 60.0
    total_s: float = 3600.0
    probe_s: float = 5.0  # health, metrics, capabilities, tokenize


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response, its body read."""

    status: int
    content_type: str
    body: bytes
    retry_after_s: float | None = None


class Upstream:
    """Connections to one replica. `url` is scheme, host, port and perhaps a path prefix; paths are added to it."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        max_connections: int = 1024,
        max_body_bytes: int = 64 << 20,
        refuse_address: RefuseAddress | None = None,
    ) -> None:
        """`refuse_address`: why not to connect to an IP address; asked of each that the host resolves to."""
        self.url = check_url(url)
        self.name = name or urlsplit(self.url).netloc
        self.timeouts = timeouts or Timeouts()
        self._max_connections = max_connections
        self._max_body_bytes = max_body_bytes
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "turnkeep"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._resolver = None if refuse_address is None else _Guarded(refuse_address)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def path(self) -> str:
        """The URL's path prefix, mostly empty."""
        return urlsplit(self.url).path

    async def get(self, path: str, *, timeout_s: float | None = None) -> Reply:
        return await self._whole("GET", path, None, JSON, timeout_s)

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        content_type: str = JSON,
        timeout_s: float | None = None,
        request_id: str = "",
    ) -> Reply:
        return await self._whole("POST", path, body, content_type, timeout_s, request_id)

    async def put(
        self, path: str, pieces: AsyncIterator[bytes], *, content_type: str, timeout_s: float | None = None
    ) -> Reply:
        """A body of unknown length, piece by piece; sent once, whatever happens."""
        return await self._whole("PUT", path, pieces, content_type, timeout_s or self.timeouts.total_s)

    async def delete(self, path: str, *, timeout_s: float | None = None) -> Reply:
        return await self._whole("DELETE", path, None, JSON, timeout_s)

    async def open(
        self, path: str, body: bytes, *, content_type: str = JSON, request_id: str = "", patient: bool = False
    ) -> ByteStream:
        """POST and return once the response's headers are in. The caller closes the stream.

        `patient`: the answer may pause for as long as `total_s` allows, as background work does.
        """
        limits = self.timeouts
        waits = (limits.total_s, limits.total_s) if patient else (limits.first_delta_s, limits.idle_s)
        stages = _Stages(*waits, limits.total_s)
        return await self._send("POST", path, body, content_type, "text/event-stream", stages, request_id)

    async def open_get(self, path: str, *, accept: str) -> ByteStream:
        """GET and return once the response's headers are in. The caller closes the stream."""
        limits = self.timeouts
        stages = _Stages(limits.probe_s, limits.idle_s, limits.total_s)
        return await self._send("GET", path, None, JSON, accept, stages)

    async def aclose(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _whole(
        self,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes] | None,
        content_type: str,
        timeout_s: float | None,
        request_id: str = "",
    ) -> Reply:
        limit = timeout_s or self.timeouts.probe_s
        stream = await self._send(method, path, body, content_type, JSON, _Stages(limit, limit, limit), request_id)
        try:
            return Reply(stream.status, stream.content_type, await stream.read_all(), stream.retry_after_s)
        finally:
            stream.close()

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes] | None,
        content_type: str,
        accept: str,
        stages: _Stages,
        request_id: str = "",
    ) -> ByteStream:
        headers = {"Accept": accept}
        if body is not None:
            headers["Content-Type"] = content_type
        if request_id:
            headers["X-Request-Id"] = request_id
        started = asyncio.get_running_loop().time()
        again = body is None or isinstance(body, bytes)
        while True:
            try:
                async with asyncio.timeout_at(started + min(stages.first_delta_s, stages.total_s)):
                    response = await self._client().request(
                        method, self.url + path, data=_in_pieces(body), headers=headers, allow_redirects=False
                    )
                break
            except TimeoutError as error:
                raise self._timeout(error, stages) from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                connecting = isinstance(error, aiohttp.ClientConnectorError)
                soon = asyncio.get_running_loop().time() - started < RETRY_WITHIN_S
                if connecting or not soon or not again:
                    raise self._unreachable(error) from error
                again = False
            except aiohttp.ClientConnectionError as error:
                raise self._unreachable(error) from error
            except (aiohttp.ClientError, ValueError) as error:  # ValueError: a header that is none
                raise EngineBroken(
                    f"{self.name} does not speak HTTP: {_first_line(error)}", replica=self.name
                ) from error
        stream = ByteStream(response, self.name, stages, started, self._max_body_bytes)
        if response.headers.get("Content-Encoding", "identity") not in ("identity", ""):
            stream.close()
            raise EngineBroken(f"{self.name} compressed its answer, which was not asked for", replica=self.name)
        return stream

    def _client(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineUnreachable(f"the connections to {self.name} are closed", replica=self.name)
        if self._session is None:
            connect = self.timeouts.connect_s
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._max_connections, keepalive_timeout=KEEPALIVE_S, resolver=self._resolver
                ),
                timeout=aiohttp.ClientTimeout(total=None, connect=connect, sock_connect=connect),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _timeout(self, error: TimeoutError, stages: _Stages) -> EngineTimeout:
        stage: Literal["connect", "first_delta", "total"]
        stage = "total" if stages.total_s < stages.first_delta_s else "first_delta"
        if isinstance(error, aiohttp.ServerTimeoutError):
            stage = "connect"
        return EngineTimeout(f"{self.name} did not answer in time ({stage})", stage=stage, replica=self.name)

    def _unreachable(self, error: Exception) -> EngineUnreachable:
        return EngineUnreachable(f"{self.name} cannot be reached: {_first_line(error)}", replica=self.name)


class _Guarded(aiohttp.abc.AbstractResolver):
    """Resolves as ever, and refuses what it is told to refuse: a name may lead elsewhere at any time."""

    def __init__(self, refuse: RefuseAddress) -> None:
        self._refuse = refuse
        self._inner = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        for entry in found:
            if (why := self._refuse(entry["host"])) is not None:
                raise OSError(errno.EACCES, f"it leads to a place where no replica may be: {why}")
        return found

    async def close(self) -> None:
        await self._inner.close()


@dataclass(frozen=True, slots=True)
class _Stages:
    first_delta_s: float
    idle_s: float
    total_s: float


class ByteStream:
    """A response whose body is being read. One timer watches it, not one a read."""

    def __init__(
        self, response: aiohttp.ClientResponse, name: str, stages: _Stages, started: float, max_body_bytes: int
    ) -> None:
        self.status = response.status
        self.content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        self.retry_after_s = parse_retry_after(response.headers.get("Retry-After"), time.time())
        self.name = name
        self._response = response
        self._max_body_bytes = max_body_bytes
        self._stages = stages
        self._loop = asyncio.get_running_loop()
        self._total_at = started + stages.total_s
        self._first_at = started + stages.first_delta_s
        self._begun = False
        self._idle_s = stages.idle_s
        self._waiting_since: float | None = None
        self._expired: Literal["first_delta", "idle", "total"] | None = None
        self._ended = False
        self._timer = self._loop.call_at(min(self._first_at, self._total_at), self._watch)

    def begun(self) -> None:
        """The first delta came: from now on each wait has `idle_s`."""
        if not self._begun:
            self._begun = True
            self._rearm()

    def hurry(self, idle_s: float) -> None:
        """Only the tail is missing: shorten each wait to at most `idle_s`."""
        self._idle_s = min(self._idle_s, idle_s)
        self._rearm()

    async def read(self) -> bytes:
        """What has come since the last read, at least one byte; empty at the end.

        Raises EngineTimeout, or EngineUnreachable when the connection broke.
        """
        self._waiting_since = self._loop.time()
        try:
            chunk = await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            self.close()
            if self._expired is not None:
                message = f"{self.name} sent nothing in time ({self._expired})"
                raise EngineTimeout(message, stage=self._expired, replica=self.name) from error
            message = f"the connection to {self.name} broke: {_first_line(error)}"
            raise EngineUnreachable(message, replica=self.name) from error
        finally:
            self._waiting_since = None
        if not chunk:
            self._ended = True
        return chunk

    async def read_all(self) -> bytes:
        """The whole body. Raises EngineBroken when it is larger than `max_body_bytes`."""
        parts: list[bytes] = []
        size = 0
        while chunk := await self.read():
            size += len(chunk)
            if size > self._max_body_bytes:
                message = f"the answer of {self.name} is larger than {self._max_body_bytes} bytes"
                raise EngineBroken(message, replica=self.name)
            parts.append(chunk)
        return b"".join(parts)

    async def finish(self) -> None:
        """The answer is complete: give the connection back if the response ends at once, else close it."""
        self.hurry(DRAIN_S)
        try:
            while await self.read():
                pass
        except (EngineTimeout, EngineUnreachable):
            pass  # the answer was complete; only the connection is lost
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connection at once unless the response was read to its end; may be called again."""
        self._timer.cancel()
        self._response.close()

    def _rearm(self) -> None:
        self._timer.cancel()
        if not self._ended:
            self._watch()

    def _watch(self) -> None:
        now = self._loop.time()
        stage: Literal["first_delta", "idle", "total"]
        if not self._begun:
            stage, due = "first_delta", self._first_at
            if self._waiting_since is not None:
                due = min(due, self._waiting_since + self._idle_s) if self._idle_s < self._stages.idle_s else due
        else:
            stage, due = "idle", (now if self._waiting_since is None else self._waiting_since) + self._idle_s
        if self._total_at <= due:
            stage, due = "total", self._total_at
        if now >= due:
            self._expired = stage
            self._response.close()
        else:
            self._timer = self._loop.call_at(due, self._watch)


def check_url(url: str) -> str:
    """`url` without a trailing slash. Raises ValueError for what is no plain http(s) URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {url!r}")
    if parts.username or parts.password:
        raise ValueError("credentials do not belong in the URL; give them as api_key")
    if parts.query or parts.fragment:
        raise ValueError(f"a replica's URL has no query and no fragment: {url!r}")
    return url.rstrip("/")


def parse_retry_after(value: str | None, now: float) -> float | None:
    """Seconds to wait, a day at most, from a Retry-After header (RFC 9110 10.2.3: seconds or a date); None if it says
    neither."""
    if not value:
        return None
    try:
        wait_s = float(value)
    except ValueError:
        try:
            wait_s = parsedate_to_datetime(value).timestamp() - now
        except (TypeError, ValueError, OverflowError):
            return None
    return None if math.isnan(wait_s) else min(max(0.0, wait_s), MAX_RETRY_AFTER_S)


def _in_pieces(body: bytes | AsyncIterator[bytes] | None) -> bytes | io.BytesIO | AsyncIterator[bytes] | None:
    """A large body as a file, which is written piece by piece and does not hold up the loop."""
    return io.BytesIO(body) if isinstance(body, bytes) and len(body) > PIECE_BYTES else body


def _first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
