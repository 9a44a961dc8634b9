"""Two `turnkeep serve` processes on one PostgreSQL: one order of turns, whoever is asked."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.faults.processes import Supervised, echo_command, free_port, serve_command, serve_environ
from tests.gateway.live import events_of

pytestmark = [pytest.mark.anyio, pytest.mark.postgres]

TERMINAL = ("session.turn.completed", "session.turn.incomplete", "session.turn.failed")
LONG = "the keeper writes the hour into the book " * 8  # some seconds of answer


@dataclass(frozen=True)
class Pair:
    gateways: tuple[Supervised, Supervised]
    clients: tuple[httpx.AsyncClient, httpx.AsyncClient]
    engine: httpx.AsyncClient

    async def running(self) -> int:
        """Requests that the engine works on."""
        return int((await self.engine.get("/health")).json()["load"]["running"])


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As everywhere, but for the whole module: its processes are started once."""
    return "asyncio", {"use_uvloop": False}


@pytest.fixture(scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("two")
    engine_port, ports = free_port(), (free_port(), free_port())
    upstream = f"http://127.0.0.1:{engine_port}"
    environ = serve_environ(folder / "data", lease_s=4, lease_renew_s=0.8)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engine = await enter(Supervised(echo_command(engine_port, 100), upstream, "/health", log=folder / "engine"))
        gateways = [
            await enter(
                Supervised(
                    serve_command(port, [upstream], postgres_url),
                    f"http://127.0.0.1:{port}",
                    "/readyz",
                    log=folder / f"gateway-{port}",
                    environ=lambda life: environ,
                )
            )
            for port in ports
        ]
        await asyncio.gather(engine.ready(), *(gateway.ready() for gateway in gateways))
        a, b, behind = [
            await enter(httpx.AsyncClient(base_url=one.url, timeout=60, trust_env=False)) for one in (*gateways, engine)
        ]
        yield Pair((gateways[0], gateways[1]), (a, b), behind)


@pytest.fixture
async def pair(processes: Pair) -> AsyncIterator[Pair]:
    """Both gateways serve; one that a test killed is up again after it."""
    yield processes
    await asyncio.gather(*(gateway.ready() for gateway in processes.gateways))


async def make(client: httpx.AsyncClient) -> str:
    """A new session's path."""
    answer = await client.post("/v1/sessions", json={"model": "echo"})
    assert answer.status_code == 201, answer.text
    return f"/v1/sessions/{answer.json()['id']}"


async def turns(client: httpx.AsyncClient, path: str, **query: Any) -> list[dict[str, Any]]:
    return list((await client.get(f"{path}/turns", params={"limit": 100, **query})).json()["data"])


async def until_begun(client: httpx.AsyncClient, path: str) -> None:
    for _ in range(200):
        if await turns(client, path):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the turn did not begin within 10 s")


async def begin(client: httpx.AsyncClient, path: str, text: str, key: str, after: int = 3) -> list[dict[str, Any]]:
    """Start a streamed turn, drop its stream after `after` events; the events."""
    seen = []
    body = {"input": text, "stream": True, "max_output_tokens": 1000}
    async with client.stream("POST", f"{path}/turns", json=body, headers={"idempotency-key": key}) as response:
        async for event in events_of(response):
            seen.append(event)
            if len(seen) == after:
                break
    return seen


async def follow(client: httpx.AsyncClient, path: str, turn: str, after: int) -> list[dict[str, Any]]:
    url = f"{path}/turns/{turn}/stream"
    async with client.stream("GET", url, params={"starting_after": after}) as response:
        return [event async for event in events_of(response)]


def whole(events: list[dict[str, Any]], text: str) -> None:
    """Every event once, in order, the terminal one last."""
    assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] in TERMINAL for event in events] == [False] * (len(events) - 1) + [True]
    assert "".join(event.get("delta", "") for event in events) == text


async def test_fifty_sessions_written_through_both_at_once_keep_one_order_each(pair: Pair) -> None:
    told: Counter[str] = Counter()

    async def write(number: int) -> None:
        path = await make(pair.clients[0])

        async def one(client: httpx.AsyncClient, text: str) -> tuple[str, str] | None:
            answer = await client.post(f"{path}/turns", json={"input": text, "max_output_tokens": 64})
            told[f"{answer.status_code}"] += 1
            if answer.status_code == 409:
                assert answer.json()["error"]["code"] == "session_busy"
                assert int(answer.headers["retry-after"]) >= 1
                return None
            assert (answer.status_code, answer.json().get("status")) == (200, "completed"), answer.text
            return str(answer.json()["id"]), text

        acknowledged: list[tuple[str, str]] = []
        for round_ in range(3):
            outcomes = await asyncio.gather(
                *(one(client, f"s{number} r{round_} {name}") for client, name in zip(pair.clients, "ab", strict=True))
            )
            assert any(outcomes), "both were refused"
            acknowledged += [outcome for outcome in outcomes if outcome is not None]
        path_turns = await turns(pair.clients[number % 2], path, branch="head", include="token_ids")
        assert sorted((t["id"], t["input"][0]["content"]) for t in path_turns) == sorted(acknowledged)
        assert [t["parent_id"] for t in path_turns] == [None, *(t["id"] for t in path_turns[:-1])]
        assert [t["seq"] for t in path_turns] == list(range(1, len(path_turns) + 1))
        for before, after in itertools.pairwise(path_turns):
            assert after["tokens"]["base_tokens"] == before["tokens"]["path_tokens"]
            assert after["created_at"] >= before["completed_at"] - 1e-3, "two turns ran at once"

    await asyncio.gather(*(write(number) for number in range(50)))
    assert told["409"] > 0, "nothing was ever busy: the gateways did not meet"


async def test_a_holder_that_was_stopped_beyond_its_lease_is_refused_by_the_fence(pair: Pair) -> None:
    a, b = pair.clients
    path = await make(a)
    stopped = asyncio.create_task(a.post(f"{path}/turns", json={"input": LONG, "max_output_tokens": 1000}))
    await until_begun(b, path)
    pair.gateways[0].send(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while (answer := await b.post(f"{path}/turns", json={"input": "mine"})).status_code == 409:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
    assert answer.json()["status"] == "completed", answer.text
    pair.gateways[0].send(signal.SIGCONT)
    late = await stopped
    assert (late.status_code, late.json()["error"]["code"]) == (502, "lease_lost")
    found = await turns(b, path)
    assert [turn["status"] for turn in found] == ["incomplete", "completed"]
    assert found[0]["output"] == []
    assert (await a.post(f"{path}/turns", json={"input": "on"})).json()["parent_id"] == found[1]["id"]


async def test_a_cancel_sent_to_the_other_gateway_stops_the_engine_within_a_second(pair: Pair) -> None:
    a, b = pair.clients
    path = await make(a)
    (started, *_) = await begin(a, path, LONG, "k")
    assert await pair.running() == 1
    began = time.monotonic()
    assert (await b.post(f"{path}/turns/{started['turn']['id']}/cancel")).status_code == 202
    while await pair.running():
        assert time.monotonic() - began < 1.0
        await asyncio.sleep(0.02)
    events = await follow(b, path, started["turn"]["id"], 0)
    assert events[-1]["type"] == "session.turn.incomplete"
    (kept,) = await turns(b, path)
    assert (kept["status"], kept["finish_reason"]) == ("incomplete", "cancelled")
    assert LONG.startswith(kept["output"][0]["content"][0]["text"])


async def test_a_retry_sent_to_the_other_gateway_while_it_runs_gives_the_same_answer(pair: Pair) -> None:
    a, b = pair.clients
    path = await make(a)
    body = {"input": LONG[:120], "max_output_tokens": 1000}
    first = asyncio.create_task(a.post(f"{path}/turns", json=body, headers={"idempotency-key": "k"}))
    await until_begun(b, path)
    again = await b.post(f"{path}/turns", json=body, headers={"idempotency-key": "k"})
    assert again.json() == (await first).json()
    other = await b.post(f"{path}/turns", json={"input": "else"}, headers={"idempotency-key": "k"})
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(await turns(a, path)) == 1


async def test_a_dropped_stream_goes_on_at_the_other_gateway_while_it_runs_and_after(pair: Pair) -> None:
    a, b = pair.clients
    path = await make(a)
    seen = await begin(a, path, LONG, "k")
    turn = seen[0]["turn"]["id"]
    rest = await follow(b, path, turn, len(seen))
    whole(seen + rest, LONG)
    assert await follow(b, path, turn, 0) == await follow(a, path, turn, 0) == seen + rest
    for after in (1, len(seen), len(seen + rest) - 1):
        assert await follow(b, path, turn, after) == (seen + rest)[after:]
    for client in (a, b):  # whoever has it all is told no more, and is not kept waiting
        assert await asyncio.wait_for(follow(client, path, turn, len(seen + rest)), 3) == []
        assert await asyncio.wait_for(follow(client, path, turn, 10_000), 3) == []


async def test_a_stream_whose_gateway_died_ends_with_a_terminal_event_at_the_other(pair: Pair) -> None:
    a, b = pair.clients
    path = await make(a)
    seen = await begin(a, path, LONG, "k", after=12)
    pair.gateways[0].kill()
    rest = await asyncio.wait_for(follow(b, path, seen[0]["turn"]["id"], len(seen)), 15)
    numbers = [event["sequence_number"] for event in seen + rest]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [event["type"] for event in rest if event["type"] in TERMINAL] == ["session.turn.incomplete"]
    assert rest[-1]["type"] == "session.turn.incomplete"


async def test_a_patch_through_one_is_seen_by_the_next_turn_of_the_other(pair: Pair) -> None:
    a, b = pair.clients
    path = await make(a)
    await a.post(f"{path}/turns", json={"input": "one"})
    await a.patch(path, json={"system": "Be long."}, headers={"if-match": "*"})
    turn = (await b.post(f"{path}/turns", json={"input": "two"})).json()
    assert turn["prefix_report"]["cause"] == "system_changed"
    shown = (await a.get(f"{path}/context")).json()
    assert shown["messages"][0] == {"role": "system", "content": "Be long."}
