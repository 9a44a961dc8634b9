"""The line before a replica as a client meets it: 429 with nothing stored, `queued_ms`, a cancel that leaves it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engines.contract import Delta, GenerateRequest
from engines.echo import EchoEngine
from gateway.fleet.replica import Replica
from gateway.secrets import load_secret
from gateway.tenancy import new_key
from tests.gateway.fleet.test_fairness import jain
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio


@dataclass
class Gate:
    """Answers stand still until it is opened."""

    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, seconds: float) -> None:
        await self.open.wait()


@dataclass
class Rig:
    live: Live
    gate: Gate

    @property
    def replica(self) -> Replica:
        (replica,) = self.live.app.state.gateway.fleet
        assert isinstance(replica, Replica)
        return replica

    async def until(self, *, running: int, waiting: int) -> None:
        for _ in range(1000):
            if (self.replica.in_flight, self.replica.queued) == (running, waiting):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{self.replica.in_flight} run and {self.replica.queued} wait")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    gate = Gate()
    engine = EchoEngine(tokens_per_s=1.0, sleep=gate)
    async with live_gateway(tmp_path, {"echo": engine}, max_in_flight=1, queue_max_waiting=1) as live:
        yield Rig(live, gate)
        gate.open.set()


async def test_a_full_line_is_429_with_retry_after_and_leaves_no_trace(rig: Rig) -> None:
    sessions = [await rig.live.session(model="echo") for _ in range(3)]
    first = asyncio.create_task(rig.live.turn(sessions[0], "one"))
    await rig.until(running=1, waiting=0)
    second = asyncio.create_task(rig.live.turn(sessions[1], "two"))
    await rig.until(running=1, waiting=1)
    for headers in ({}, {"idempotency-key": "k"}):
        refused = await rig.live.turn(sessions[2], "three", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
    streamed = await rig.live.chat([{"role": "user", "content": "four"}], stream=True)
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (429, "queue_full")
    assert await rig.live.turns(sessions[2]) == []
    rig.gate.open.set()
    answers = [(await turn).json() for turn in (first, second)]
    assert [answer["status"] for answer in answers] == ["completed", "completed"]
    assert answers[0]["metadata"]["queued_ms"] < answers[1]["metadata"]["queued_ms"]
    again = await rig.live.turn(sessions[2], "three", headers={"idempotency-key": "k"})
    assert again.json()["status"] == "completed", "the key is free: the refused turn never was"
    metrics = (await rig.live.client.get("/metrics")).text
    assert 'turnkeep_queue_refused_total{reason="full",replica="echo"} 3.0' in metrics
    assert 'turnkeep_replica_waiting{replica="echo"} 0.0' in metrics


async def test_a_cancelled_turn_and_a_client_that_left_are_out_of_the_line_at_once(rig: Rig) -> None:
    sessions = [await rig.live.session(model="echo") for _ in range(2)]
    first = asyncio.create_task(rig.live.turn(sessions[0], "one"))
    await rig.until(running=1, waiting=0)
    second = asyncio.create_task(rig.live.turn(sessions[1], "two"))
    await rig.until(running=1, waiting=1)
    assert (await rig.live.client.post(f"/v1/sessions/{sessions[1]}/turns/1/cancel")).status_code == 202
    await rig.until(running=1, waiting=0)
    assert (await second).json()["status"] == "incomplete"
    gone = asyncio.create_task(rig.live.chat([{"role": "user", "content": "x"}]))  # on_disconnect: cancel
    await rig.until(running=1, waiting=1)
    gone.cancel()
    await rig.until(running=1, waiting=0)
    rig.gate.open.set()
    assert (await first).json()["status"] == "completed"


class Noting(EchoEngine):
    """Notes whose turns came to it, in order, by the salt of the tenant."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(tokens_per_s=1.0, sleep=gate)
        self.served: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        self.served.append(request.cache_salt)
        async for delta in super().generate(request):
            yield delta


STORM, EACH = 60, 8  # the client has a hundred connections


async def test_tenants_get_equal_shares_of_a_replica_while_one_of_them_storms_it(tmp_path: Path) -> None:
    gate = Gate()
    engine = Noting(gate)
    async with live_gateway(tmp_path, {"echo": engine}, max_in_flight=4, auth=True) as live:
        rig, gateway = Rig(live, gate), live.app.state.gateway
        keys = {}
        for tenant in ("storm", "a", "b", "c", "d"):
            key, record = new_key(load_secret(gateway.settings), tenant_id=tenant, name="test", now=gateway.clock())
            await gateway.store.add_key(record)
            keys[tenant] = {"authorization": f"Bearer {key}"}

        def ask(tenant: str, number: int) -> asyncio.Task[None]:
            async def answered() -> None:
                text = [{"role": "user", "content": f"message number {number:03} of one tenant"}]
                answer = await live.chat(text, headers=keys[tenant], store=False)
                assert answer.status_code == 200, answer.text

            return asyncio.create_task(answered())

        turns = [ask("storm", n) for n in range(STORM)]
        await rig.until(running=4, waiting=STORM - 4)
        turns += [ask(tenant, n) for n in range(EACH) for tenant in "abcd"]
        await rig.until(running=4, waiting=STORM - 4 + 4 * EACH)
        gate.open.set()
        await asyncio.gather(*turns)
    contended = engine.served[4 : 4 + 5 * EACH]  # from when all five waited until the four small ones had been served
    served = Counter(contended)
    assert len(served) == 5
    assert jain([float(count) for count in served.values()]) > 0.95, served  # in order of arrival: 0.2
    assert Counter(engine.served).most_common(1)[0][1] == STORM, "and the storm is served to its end"
