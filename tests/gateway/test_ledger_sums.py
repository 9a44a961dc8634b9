"""Whatever becomes of turns, the ledger holds what the turns' own usage says: two gateways, replicas that die, cancels,
clients that leave, requests that come again."""

from __future__ import annotations

import asyncio
import random
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from engines.echo import EchoEngine
from gateway.store.sessions import Store
from gateway.store.usage_records import Amount, UsageQuery, amount_of
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio
TALKS, TURNS = 8, 5


async def turn(one: Live, chance: random.Random, session: str) -> None:
    """One turn that is heard out, cancelled, left alone, or asked for again until it is answered."""
    key = {"idempotency-key": uuid.uuid4().hex}
    body = {"input": "the keeper writes " * 8, "max_output_tokens": 60, "stream": True, "on_disconnect": "cancel"}
    way = chance.choice(("whole", "cancel", "leave", "again"))
    path = f"/v1/sessions/{session}/turns"
    if way in ("whole", "again"):
        for _ in range(4 if way == "again" else 1):
            answer = await one.client.post(path, json={**body, "stream": False}, headers=key)
            if answer.status_code == 200:
                return
            await asyncio.sleep(0.02)
        return
    async with one.client.stream("POST", path, json=body, headers=key) as stream:
        try:
            async for line in stream.aiter_lines():
                if line.startswith("data: ") and '"type":"session.turn.started"' in line.replace(" ", ""):
                    break
            if way == "cancel" and stream.status_code == 200:
                newest = (await one.turns(session, order="desc"))[0]["id"]
                await one.client.post(f"{path}/{newest}/cancel")
                await stream.aread()
        except httpx.StreamError:
            pass


async def idle(store: Store, session: str) -> None:
    for _ in range(600):
        record = await store.get_session("default", session)
        assert record is not None
        if record.status == "idle":
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{session} still runs")


async def test_the_ledger_holds_what_the_turns_say(tmp_path: Path) -> None:
    chance = random.Random(5)
    async with AsyncExitStack() as stack:
        gateways = []
        for name in ("a", "b"):
            engines = {
                f"{name}{n}": EchoEngine(
                    name=f"{name}{n}", tokens_per_s=800, fail_first=n, die_after=3, die_times=6 * n
                )
                for n in range(2)
            }
            gateways.append(await stack.enter_async_context(live_gateway(tmp_path, engines, gateway_name=name)))
        sessions = [await gateways[0].session(user_ref=f"user{n % 3}") for n in range(TALKS)]

        async def talk(session: str) -> None:
            for _ in range(TURNS):
                await turn(chance.choice(gateways), chance, session)

        await asyncio.gather(*(talk(session) for session in sessions))
        store: Store = gateways[1].app.state.gateway.store
        said = Amount()
        kinds: set[str] = set()
        for session in sessions:
            await idle(store, session)
            turns = await store.list_turns("default", session, limit=1000)
            said += sum((amount_of(record.usage) for record in turns), Amount())
            kinds |= {record.turn.status for record in turns}
        page = await store.usage(UsageQuery("default", 0, 100_000, ("session", "user")))
        assert sum((line.total("turn") for line in page.lines), Amount()) == said
        assert {"completed", "incomplete"} <= kinds
        assert said.output > 0
