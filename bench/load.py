"""Requests at a gateway: 16 at once, answers whole or streamed, first bytes stamped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

AT_ONCE = 16
DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Streamed:
    ttft_s: float  # from the request to the first event that holds text
    chunks: int  # events that hold text


class Client:
    """One server. Raises RuntimeError for any status but 200 and 201."""

    def __init__(self, url: str, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.url, self._session, self._headers = url, session, headers

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        data = orjson.dumps(body)
        async with self._session.post(self.url + path, data=data, headers=self._all(headers)) as response:
            content = await response.read()
            if response.status not in (200, 201):
                raise RuntimeError(f"{path} answered {response.status}: {content[:400]!r}")
            answer: dict[str, Any] = orjson.loads(content)
            return answer

    async def stream(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Streamed:
        data, began = orjson.dumps({**body, "stream": True}), time.perf_counter()
        first, chunks, rest = 0.0, 0, b""
        async with self._session.post(self.url + path, data=data, headers=self._all(headers)) as response:
            if response.status != 200:
                raise RuntimeError(f"{path} answered {response.status}: {(await response.read())[:400]!r}")
            async for piece in response.content.iter_any():
                *events, rest = (rest + piece).split(b"\n\n")
                found = sum(1 for event in events if _holds_text(event))
                if found and not chunks:
                    first = time.perf_counter() - began
                chunks += found
        return Streamed(first, chunks)

    def _all(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        return {"Content-Type": "application/json", **self._headers, **(headers or {})}


def _holds_text(event: bytes) -> bool:
    marks = (b'"content":"', b'"content": "', b'"text":"', b'"delta":"')
    return any(mark in event and mark + b'"' not in event for mark in marks) and not event.startswith(DONE)


async def at_once(jobs: Iterable[Callable[[], Awaitable[None]]], limit: int = AT_ONCE) -> float:
    """Run all, `limit` at a time; seconds of wall time."""
    waiting = iter(list(jobs))

    async def work() -> None:
        for job in waiting:
            await job()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(limit):
            group.create_task(work())
    return time.perf_counter() - began


def connected(loads: int = 64) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=loads, keepalive_timeout=4.0),
        timeout=aiohttp.ClientTimeout(total=300),
        trust_env=False,
    )
