"""Speaks to a gateway's session API, for the commands that do. Knows no database and no terminal.

The HTTP client is imported when one is made: the other words of the command do without it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import orjson

from engines.contract import EngineError
from engines.remote.sse import SseParser

if TYPE_CHECKING:
    from engines.remote.http import ByteStream, Reply


class Unreachable(Exception):
    """No gateway answered at this URL, or it broke off."""


class Refused(Exception):
    """The gateway answered with an error."""

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(str(error.get("message", f"status {status}")))
        self.status = status
        self.code = str(error.get("code", ""))
        self.request_id = str(error.get("request_id", ""))


class GatewayClient:
    """A connection to one gateway, as one API key. Closed by `aclose`."""

    def __init__(self, url: str, api_key: str | None) -> None:
        from engines.remote.http import Timeouts, Upstream

        patient = Timeouts(connect_s=5.0, first_delta_s=900.0, idle_s=120.0, total_s=7200.0, probe_s=60.0)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = Upstream(self.url, name=self.url, api_key=api_key, timeouts=patient)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, **query: str | int | None) -> Any:
        """JSON of a GET. Raises Unreachable, Refused."""
        return orjson.loads(await self.get_bytes(path, **query))

    async def get_bytes(self, path: str, **query: str | int | None) -> bytes:
        wanted = {name: value for name, value in query.items() if value is not None}
        return _body(await _told(self._http.get(f"{path}?{urlencode(wanted)}" if wanted else path)))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return orjson.loads(_body(await _told(self._http.post(path, orjson.dumps(body)))))

    async def delete(self, path: str) -> Any:
        return orjson.loads(_body(await _told(self._http.delete(path))) or b"null")

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON events of a streamed POST, in order. Raises Unreachable, Refused."""
        stream: ByteStream = await _told(self._http.open(path, orjson.dumps(body)))
        try:
            if stream.status >= 400:
                raise _refused(stream.status, await _told(stream.read_all()))
            stream.begun()
            parser = SseParser()
            while chunk := await _told(stream.read()):
                for event in parser.feed(chunk):
                    if event.data != b"[DONE]":
                        yield orjson.loads(event.data)
        finally:
            stream.close()


def session_path(session_id: str, *rest: str) -> str:
    return "/".join(["/v1/sessions", quote(session_id, safe=""), *rest])


async def _told(work: Any) -> Any:
    try:
        return await work
    except EngineError as error:
        raise Unreachable(str(error)) from error


def _body(reply: Reply) -> bytes:
    if reply.status >= 400:
        raise _refused(reply.status, reply.body)
    return reply.body


def _refused(status: int, body: bytes) -> Refused:
    try:
        return Refused(status, orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return Refused(status, {"message": f"status {status} and no reason; is this a Turnkeep gateway?"})
