"""The outermost layer, around an application that does not end by itself."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.api.edge import Edge

pytestmark = pytest.mark.anyio
SCOPE: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}


async def stopped(*, began: bool) -> list[Message]:
    """What is sent where the server stops an answer, at its beginning or in its midst."""
    sent: list[Message] = []
    reached = asyncio.Event()

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        if began:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        reached.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    edge = Edge(endless, lambda kind: f"{kind}_1", local_only=False, origins=frozenset())
    task = asyncio.create_task(edge(dict(SCOPE), receive, send))
    await reached.wait()
    task.cancel()
    await task
    return sent


async def test_a_request_that_is_stopped_with_the_gateway_hears_it_in_the_shape_of_every_error() -> None:
    start, body = await stopped(began=False)
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"1"
    error = orjson.loads(body["body"])["error"]
    assert (error["code"], error["request_id"]) == ("shutting_down", "req_1")


async def test_an_answer_that_is_stopped_in_its_midst_is_not_made_to_look_whole() -> None:
    assert [message["type"] for message in await stopped(began=True)] == ["http.response.start"]
