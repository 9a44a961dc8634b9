"""A session's K/V at one of our own replicas: put down, taken up, carried out and in (docs/engine-wire.md)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote, urlencode

from engines.contract import RequestRefused
from engines.local.session_doors import CONTENT_TYPE
from engines.remote.http import Reply, Upstream
from engines.remote.refusal import read_complaint
from engines.remote.replies import check, json_of

REFUSED = frozenset({404, 409, 422, 501, 507})  # what says something of the session, and nothing of the replica
WRITE_S = 120.0  # a file of a long session is written, or read


async def ask(upstream: Upstream, what: str, session: str, salt: str) -> dict[str, Any]:
    """POST …/suspend or …/resume. Raises RequestRefused, EngineError."""
    return _told(await upstream.post(_path(session, what, salt), b"", timeout_s=WRITE_S), upstream.name)


async def kv_out(upstream: Upstream, session: str, salt: str) -> AsyncGenerator[bytes, None]:
    stream = await upstream.open_get(_path(session, "kv", salt), accept=CONTENT_TYPE)
    try:
        if stream.status != 200:
            _told(Reply(stream.status, stream.content_type, await stream.read_all()), upstream.name)
        stream.begun()
        while piece := await stream.read():
            yield piece
    finally:
        stream.close()


async def kv_in(upstream: Upstream, session: str, salt: str, file: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    async with aclosing(file) as pieces:
        reply = await upstream.put(_path(session, "kv", salt), pieces, content_type=CONTENT_TYPE)
    return _told(reply, upstream.name)


def _told(reply: Reply, name: str) -> dict[str, Any]:
    if reply.status in REFUSED:
        complaint = read_complaint(reply.body)
        raise RequestRefused(f"{name}: {complaint.message}", code=complaint.code or "not_found", replica=name)
    check(reply, name)
    return json_of(reply, name)


def _path(session: str, what: str, salt: str) -> str:
    return f"/turnkeep/v1/sessions/{quote(session, safe='')}/{what}?{urlencode({'salt': salt})}"
