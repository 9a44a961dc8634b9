"""Sessions are suspended and resumed at the replica that their pin names; a drain carries K/V where both ends can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.contract import Capabilities, Delta, EngineUnreachable, GenerateRequest, IdsPrompt, RequestRefused
from engines.echo import EchoEngine
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio
LONG = "a message that is longer than a block of the engine, so that there is something to be found again"


class KeepingEcho(EchoEngine):
    """Says that it keeps K/V, and remembers what it was asked."""

    refuses: str | None = None
    breaks = False

    def __init__(self, name: str) -> None:
        super().__init__(name=name, fingerprint="weights", prefill_tokens_per_s=1e9)
        self.asked: list[tuple[str, str, str]] = []
        self.came: list[bytes] = []
        self.ran: list[tuple[str | None, str, int]] = []  # session, salt, priority

    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), suspends=True, carries_kv=True)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        assert isinstance(request.prompt, IdsPrompt)
        self.ran.append((request.prompt.session, request.cache_salt, request.priority))
        async for delta in super().generate(request):
            yield delta

    async def suspend(self, session: str, salt: str) -> dict[str, Any]:
        return self._do("suspend", session, salt) | {"tier": "disk", "blocks": 3, "bytes": 99, "path": "/secret"}

    async def resume(self, session: str, salt: str) -> dict[str, Any]:
        return self._do("resume", session, salt) | {"device": 0, "host": 3, "disk": 3}

    async def kv_out(self, session: str, salt: str) -> AsyncGenerator[bytes, None]:
        self._do("out", session, salt)
        yield b"half"
        if self.breaks:
            raise EngineUnreachable("gone", replica=self.name)
        yield b" and half"

    async def kv_in(self, session: str, salt: str, file: AsyncGenerator[bytes, None]) -> dict[str, Any]:
        self.came.append(b"".join([piece async for piece in file]))
        return self._do("in", session, salt)

    def _do(self, what: str, session: str, salt: str) -> dict[str, Any]:
        self.asked.append((what, session, salt))
        if self.refuses is not None:
            raise RequestRefused("it will not", code=self.refuses, replica=self.name)
        return {"tokens": 40}


async def test_a_session_is_put_down_where_it_lies(tmp_path: Path) -> None:
    engine = KeepingEcho("a")
    async with live_gateway(tmp_path, {"a": engine}) as live:
        session = await live.session(model="echo")
        await live.turn(session, LONG)
        down = await live.client.post(f"/v1/sessions/{session}/suspend")
        up = await live.client.post(f"/v1/sessions/{session}/resume")
        lines = (await live.client.get("/admin/v1/audit")).json()["data"]
    wanted = {"id": session, "replica": "a", "tokens": 40}
    assert down.json() == wanted | {"tier": "disk", "blocks": 3, "bytes": 99}
    assert up.json() == wanted | {"device": 0, "host": 3, "disk": 3}
    name, salt, _ = engine.ran[0]
    assert engine.asked == [("suspend", name, salt), ("resume", name, salt)]
    told = [(line["action"], line["target"], line["details"], line["request_id"]) for line in lines]
    assert told == [
        ("session.resume", session, {"replica": "a"}, up.headers["x-request-id"]),
        ("session.suspend", session, {"replica": "a"}, down.headers["x-request-id"]),
    ]


@pytest.mark.parametrize("code", ["not_found", "session_busy", "storage_full", "unsupported"])
async def test_what_the_replica_refuses_is_told(tmp_path: Path, code: str) -> None:
    engine = KeepingEcho("a")
    async with live_gateway(tmp_path, {"a": engine}) as live:
        session = await live.session(model="echo")
        await live.turn(session, LONG)
        engine.refuses = code
        refused = await live.client.post(f"/v1/sessions/{session}/suspend")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, code)
        assert (await live.turn(session, "and on")).json()["status"] == "completed"


async def test_what_is_nowhere_or_cannot_be_put_down_is_told(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, {"a": EchoEngine(name="a")}) as live:
        session = await live.session(model="echo")
        codes = [await _suspended(live, session), await _suspended(live, "nobody")]
        await live.turn(session, LONG)
        codes.append(await _suspended(live, session))
    assert codes == [(409, "not_cached"), (404, "session_not_found"), (409, "unsupported")]


async def _suspended(live: Live, session: str) -> tuple[int, str]:
    refused = await live.client.post(f"/v1/sessions/{session}/suspend")
    return refused.status_code, refused.json()["error"]["code"]


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_drain_carries_what_there_is_and_computes_where_that_fails(
    tmp_path: Path, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.drain.SETTLE_S", 0.1)
    monkeypatch.setattr("gateway.sessions.draining.LOOK_EVERY_S", 0.05)
    one, two = KeepingEcho("a"), KeepingEcho("b")
    async with live_gateway(tmp_path, {"a": one, "b": two}) as live:
        session = await live.session(model="echo")
        home = (await live.turn(session, LONG)).json()["placement"]["replica"]
        old, new = (one, two) if home == "a" else (two, one)
        old.breaks = breaks
        assert (await live.client.post(f"/admin/v1/replicas/{home}/drain", json={})).status_code == 202
        for _ in range(400):
            if (await live.client.get(f"/admin/v1/replicas/{home}")).json()["state"] == "drained":
                break
            await asyncio.sleep(0.025)
        after = (await live.turn(session, "and on")).json()
    assert after["placement"]["replica"] == new.name
    name, salt, _ = old.ran[0]
    assert old.asked == [("out", name, salt)]
    prefilled = [ran for ran in new.ran if ran[2] > 0]
    if breaks:
        assert not new.asked
        assert prefilled == [(name, salt, prefilled[0][2])]
    else:
        assert new.came == [b"half and half"]
        assert new.asked == [("in", name, salt)]
        assert not prefilled, "it was computed although it was carried"
