"""A stream's failures: before its status, after heartbeats, under way, and mistakes of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from gateway.api.streams import HEARTBEAT, EventStream, failed_named
from gateway.errors import Unavailable
from gateway.store.records import StoreUnavailable

pytestmark = pytest.mark.anyio

BUSY = Unavailable("nobody can", code="overloaded", retry_after_s=2.0)
AWAY = StoreUnavailable("no route to host")


async def sent(source: AsyncGenerator[bytes, None], **more: Any) -> tuple[int, dict[bytes, bytes], bytes]:
    """(status, headers, body)"""
    told: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        told.append(message)

    await EventStream(source, heartbeat_s=0.02, **more)({"type": "http"}, receive, send)
    assert not told[-1].get("more_body")
    return told[0]["status"], dict(told[0]["headers"]), b"".join(message.get("body", b"") for message in told)


async def source(*what: bytes | float | Exception) -> AsyncGenerator[bytes, None]:
    for one in what:
        if isinstance(one, Exception):
            raise one
        if isinstance(one, float):
            await asyncio.sleep(one)
        else:
            yield one


@pytest.mark.parametrize(("error", "code"), [(BUSY, b"overloaded"), (AWAY, b"database_unavailable")])
async def test_what_fails_before_anything_was_sent_is_a_status(error: Exception, code: bytes) -> None:
    status, headers, body = await sent(source(error))
    assert (status, headers[b"content-type"]) == (503, b"application/json")
    assert int(headers[b"retry-after"]) >= 1
    assert code in body
    assert b"no route to host" not in body


@pytest.mark.parametrize(("error", "code"), [(BUSY, b"overloaded"), (AWAY, b"database_unavailable")])
@pytest.mark.parametrize("before", [(0.1,), (b"data: 1\n\n",), (0.1, b"data: 1\n\n")])
async def test_what_fails_after_it_is_the_last_event(before: tuple[Any, ...], error: Exception, code: bytes) -> None:
    status, _, body = await sent(source(*before, error))
    assert status == 200
    assert b"".join(one for one in before if isinstance(one, bytes)) in body
    last = body.removeprefix(HEARTBEAT).split(b"data: ")[-2:]
    assert code in last[0]
    assert last[1] == b"[DONE]\n\n"


async def test_a_named_event_where_the_protocol_has_names() -> None:
    _, _, body = await sent(source(b"data: 1\n\n", BUSY), failed=failed_named)
    assert body.split(b"\n\n")[1].startswith(b'event: error\ndata: {"type":"error","error":{')


async def test_headers_that_the_source_says_before_its_first_event() -> None:
    headers: dict[str, str] = {}

    async def saying() -> AsyncGenerator[bytes, None]:
        headers["x-turnkeep-turn"] = "turn_1"
        yield b"data: 1\n\n"

    assert (await sent(saying(), headers=headers))[1][b"x-turnkeep-turn"] == b"turn_1"


async def test_a_mistake_of_ours_is_raised_for_the_edge_to_tell() -> None:
    with pytest.raises(ZeroDivisionError):
        await sent(source(ZeroDivisionError()))
