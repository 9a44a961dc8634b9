"""A compaction that somebody asks for, and what happens to it meanwhile: delete, pin, a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from engines.contract import Delta, GenerateRequest
from engines.echo import EchoEngine
from tests.gateway.live import Live, live_gateway
from tests.gateway.talks import ASKED, WINDOW, compactions, context, noted, said, settled, talk, words

pytestmark = pytest.mark.anyio


class Told(EchoEngine):
    """Waits, at each request of a compaction, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(
            answer=lambda text, sampling: noted(text) if text.startswith(ASKED) else text[:64], window=WINDOW
        )
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        if request.request_id.startswith("cmp_"):
            self.begun.set()
            await self.goes_on.wait()
        async for delta in super().generate(request):
            yield delta


@pytest.fixture
async def told(tmp_path: Path) -> AsyncIterator[tuple[Live, Told, str]]:
    """A gateway, its engine, and the path of a session that can be compacted."""
    engine = Told()
    async with live_gateway(tmp_path, {"echo": engine}) as live:
        session = await live.session(policy={"mode": "manual"})
        await talk(live, session, 7)
        yield live, engine, f"/v1/sessions/{session}"


async def test_one_who_asks_for_a_compaction_hears_that_the_session_was_deleted(told: tuple[Live, Told, str]) -> None:
    live, engine, path = told
    asked = asyncio.create_task(live.client.post(f"{path}/compact"))
    await engine.begun.wait()
    assert (await live.client.delete(path)).status_code == 200
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_compaction_goes_on_where_who_asked_for_it_has_left(told: tuple[Live, Told, str]) -> None:
    live, engine, path = told
    asked = asyncio.create_task(live.client.post(f"{path}/compact"))
    await engine.begun.wait()
    asked.cancel()
    await asyncio.sleep(0.1)
    engine.goes_on.set()
    (row,) = await settled(live, path.rpartition("/")[2])
    assert (row["status"], row["error"]) == ("committed", None)


async def test_a_compaction_that_a_pin_overtakes_is_made_anew(told: tuple[Live, Told, str]) -> None:
    live, engine, path = told
    asked = asyncio.create_task(live.client.post(f"{path}/compact"))
    await engine.begun.wait()
    assert (await live.client.put(f"{path}/turns/3/pin")).status_code == 200
    engine.goes_on.set()
    made = (await asked).json()
    assert (made["status"], made["number"]) == ("committed", 2)
    assert words(3) in said(await context(live, path.rpartition("/")[2]))


async def test_a_gateway_that_is_told_to_stop_gives_the_compaction_up_at_once(told: tuple[Live, Told, str]) -> None:
    live, engine, path = told
    asked = asyncio.create_task(live.client.post(f"{path}/compact"))
    await engine.begun.wait()
    live.app.state.stopping = True
    answer = await asyncio.wait_for(asked, 2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert int(answer.headers["retry-after"]) >= 1
    (row,) = await compactions(live, path.rpartition("/")[2])
    assert (row["status"], row["error"]["code"]) == ("failed", "cancelled")
