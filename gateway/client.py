"""Speaks to a gateway's session API, for the commands that do, on httpx. Knows no database and no terminal.

The HTTP client is imported when one is made: the other words of the command do without it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from engines.remote.sse import SseParser

if TYPE_CHECKING:
    import httpx


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
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        patient = httpx.Timeout(connect=5.0, read=900.0, write=60.0, pool=60.0)
        if not self.url.startswith(("http://", "https://")):
            raise Unreachable(f"a gateway's URL is written http://HOST:PORT, not {url!r}")
        try:
            self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=patient, trust_env=False)
        except httpx.InvalidURL as error:
            raise Unreachable(f"a gateway's URL is written http://HOST:PORT, not {url!r} ({error})") from error

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, path: str, **query: str | int | None) -> Any:
        """JSON of a GET. Raises Unreachable, Refused."""
        return orjson.loads(await self.get_bytes(path, **query))

    async def get_bytes(self, path: str, **query: str | int | None) -> bytes:
        return await self._body("GET", path, params={name: v for name, v in query.items() if v is not None})

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        content = orjson.dumps(body) if body is not None else b""
        return orjson.loads(await self._body("POST", path, content=content))

    async def delete(self, path: str) -> Any:
        return orjson.loads(await self._body("DELETE", path) or b"null")

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON events of a streamed POST, in order. Raises Unreachable, Refused."""
        async with self._told(), self._http.stream("POST", path, content=orjson.dumps(body)) as response:
            if response.status_code >= 400:
                raise _refused(response.status_code, await response.aread())
            parser = SseParser()
            async for chunk in response.aiter_raw():
                for event in parser.feed(chunk):
                    if event.data != b"[DONE]":
                        yield orjson.loads(event.data)

    async def _body(self, method: str, path: str, **more: Any) -> bytes:
        async with self._told():
            response: httpx.Response = await self._http.request(method, path, **more)
        if response.status_code >= 400:
            raise _refused(response.status_code, response.content)
        return response.content

    @asynccontextmanager
    async def _told(self) -> AsyncIterator[None]:
        import httpx

        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise Unreachable(f"{self.url}: {error or type(error).__name__}") from error


def session_path(session_id: str, *rest: str) -> str:
    return "/".join(["/v1/sessions", quote(session_id, safe=""), *rest])


def _refused(status: int, body: bytes) -> Refused:
    try:
        return Refused(status, orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return Refused(status, {"message": f"status {status} and no reason; is this a Turnkeep gateway?"})
