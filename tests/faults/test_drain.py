"""Three engine processes, two gateways on one PostgreSQL: a drain under load, replicas added and removed, one home."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.processes import echo_command
from tests.faults.rig import ROUTE, Rig, started

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]

TOKENS_PER_S = 200  # a turn takes a third of a second: some run whenever something happens
TEXT = "the keeper of the lamp writes the hour into the book beside the stair"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As everywhere, but for the whole module: its processes are started once."""
    return "asyncio", {"use_uvloop": False}


@pytest.fixture(scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> AsyncIterator[Rig]:
    """c is added by those tests that want it."""
    folder = tmp_path_factory.mktemp("drain")
    async with started(
        folder, postgres_url, lambda port: echo_command(port, TOKENS_PER_S), engines="abc", named="ab"
    ) as rig:
        yield rig


@pytest.fixture
async def rig(processes: Rig) -> AsyncIterator[Rig]:
    """c is added before, and gone after; nothing is drained."""
    added = await processes.clients[0].post(ROUTE, json={"url": processes.engines[2].url, "name": "c"})
    assert added.status_code == 201, added.text
    for name in "abc":
        await asyncio.gather(*(processes.until(name, "ready", at) for at in range(2)))
    yield processes
    for name in "ab":
        assert (await processes.clients[0].post(f"{ROUTE}/{name}/undrain")).status_code == 200
    await processes.clients[0].delete(f"{ROUTE}/c")
    await asyncio.gather(*(processes.until("c", "gone", at) for at in range(2)))


@dataclass
class Talk:
    """A session that goes on through both gateways in turn; where each turn ran, and what went wrong."""

    path: str
    rig: Rig
    ran: list[tuple[str, str]] = field(default_factory=list)  # replica, reason
    failed: list[str] = field(default_factory=list)
    stop: bool = False

    async def turn(self, at: int) -> dict[str, Any]:
        body = {"input": f"{TEXT}, {len(self.ran)}", "max_output_tokens": 100}
        answer = await self.rig.clients[at].post(f"{self.path}/turns", json=body)
        told: dict[str, Any] = answer.json()
        if answer.status_code != 200 or told["status"] != "completed":
            self.failed.append(answer.text)
            return told
        self.ran.append((told["placement"]["replica"], told["placement"]["reason"]))
        return told

    async def go_on(self) -> None:
        while not self.stop:
            await self.turn(len(self.ran) % 2)


async def talks(rig: Rig, count: int) -> list[Talk]:
    made = [await rig.clients[n % 2].post("/v1/sessions", json={"model": "echo"}) for n in range(count)]
    return [Talk(f"/v1/sessions/{answer.json()['id']}", rig) for answer in made]


async def test_a_drain_under_load_fails_no_turn_and_ends_with_every_session_elsewhere(rig: Rig) -> None:
    busy, idle = await talks(rig, 9), await talks(rig, 9)
    await asyncio.gather(*(talk.turn(0) for talk in idle))
    loads = [asyncio.create_task(talk.go_on()) for talk in busy]
    await asyncio.sleep(1.5)
    victim = Counter(talk.ran[-1][0] for talk in idle).most_common(1)[0][0]
    order = await rig.clients[0].post(f"{ROUTE}/{victim}/drain", json={"timeout_s": 60})
    assert order.status_code == 202, order.text
    assert await rig.until(victim, "draining", at=1, within_s=10) <= 2.5
    known = [len(talk.ran) + 2 for talk in busy]  # a turn that was placed before it was known may still end there
    took_s = await rig.until(victim, "drained")
    await asyncio.sleep(1.0)
    for talk in busy:
        talk.stop = True
    await asyncio.gather(*loads)
    told = (await rig.shown(victim, at=1))["draining"]
    assert (told["sessions_left"], told["running"], told["failed"], told["timed_out"]) == (0, 0, 0, False)
    assert [talk.failed for talk in (*busy, *idle)] == [[]] * 18
    for talk, since in zip(busy, known, strict=True):
        assert victim not in {replica for replica, _ in talk.ran[since:]}
    was_there = [talk for talk in idle if talk.ran[-1][0] == victim]
    assert told["moved"] >= len(was_there) > 0
    returned = [await talk.turn(1) for talk in was_there]
    assert victim not in {turn["placement"]["replica"] for turn in returned}
    # a home that the busy sessions filled meanwhile may be left again, for balance
    assert {turn["placement"]["reason"] for turn in returned} <= {"pinned", "pin_over_bound"}
    at_home = [turn for turn in returned if turn["placement"]["reason"] == "pinned"]
    assert at_home
    assert all(turn["usage"]["cached_tokens"] >= 64 for turn in at_home), "a new home has read the prefix"
    assert took_s < 30


@pytest.mark.prove
async def test_two_gateways_send_a_session_to_one_home_before_and_after_a_restart_of_each(rig: Rig) -> None:
    sessions = await talks(rig, 12)
    await asyncio.gather(*(talk.turn(n % 2) for n, talk in enumerate(sessions)))
    await asyncio.gather(*(talk.turn((n + 1) % 2) for n, talk in enumerate(sessions)))
    for at in (1, 0):
        life = rig.gateways[at].lives
        rig.gateways[at].kill()
        assert await rig.gateways[at].dead(life)
        await rig.gateways[at].ready()
        turns = await asyncio.gather(*(talk.turn(at) for talk in sessions))
        assert all(turn["usage"]["cached_tokens"] >= 64 for turn in turns)
    assert [talk.failed for talk in sessions] == [[]] * 12
    assert all(len({replica for replica, _ in talk.ran}) == 1 for talk in sessions)
    assert {reason for talk in sessions for _, reason in talk.ran[1:]} == {"pinned"}
    assert len({talk.ran[0][0] for talk in sessions}) > 1


async def test_an_engine_that_died_is_back_within_five_seconds_after_it_answers(rig: Rig) -> None:
    victim = rig.engines[0]
    life = victim.lives
    victim.kill()
    assert await victim.dead(life)
    await victim.ready()
    back_s = max(await asyncio.gather(*(rig.until("a", "ready", at, within_s=20) for at in range(2))))
    assert back_s <= 5.0
    states = [change["state"] for change in (await rig.shown("a"))["history"]]
    assert states[0] == "ready"


@pytest.mark.prove
async def test_an_engine_that_stands_still_loses_no_turn_and_holds_up_none_elsewhere(rig: Rig) -> None:
    sessions = await talks(rig, 12)
    await asyncio.gather(*(talk.turn(0) for talk in sessions))
    stopped = {talk.ran[0][0] for talk in sessions}.pop()
    victim = rig.engines["abc".index(stopped)]
    elsewhere = [talk for talk in sessions if talk.ran[0][0] != stopped]
    turns = [asyncio.create_task(talk.turn(1)) for talk in sessions]
    await asyncio.sleep(0.1)
    victim.send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        await asyncio.gather(*(turn for talk, turn in zip(sessions, turns, strict=True) if talk in elsewhere))
        await asyncio.gather(*(talk.turn(0) for talk in elsewhere))
        others_s = time.monotonic() - began
        await asyncio.gather(*turns)
        stuck_s = time.monotonic() - began
        more = await asyncio.gather(*(talk.turn(0) for talk in sessions))
    finally:
        victim.send(signal.SIGCONT)
    assert [talk.failed for talk in sessions] == [[]] * 12
    assert stopped not in {turn["placement"]["replica"] for turn in more}
    assert others_s < 10.0
    assert 5.0 < stuck_s < 40.0, "the two late probes; not the five minutes that a first token may take"
    await asyncio.gather(*(rig.until(stopped, "ready", at, within_s=10) for at in range(2)))
