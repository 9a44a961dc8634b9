"""kill -9 of the gateway and of the engine, at every commit point and at any moment: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.echo import ECHO_MODEL_DIR
from gateway.sessions.tokens import ModelTokens
from tests.faults.crash import Kills, Load, crash, failpoints, points
from tests.faults.processes import (
    ROOT,
    Supervised,
    echo_command,
    engine_command,
    free_port,
    machine,
    serve_command,
    serve_environ,
)
from tests.gateway.live import events_of

pytestmark = pytest.mark.anyio

COMMITS = tuple(f"{when}_{what}_commit" for what in ("begin", "append", "finish") for when in ("before", "after"))
SEED = 20_26


@asynccontextmanager
async def running(
    folder: Path, url: str, engine: list[str], engine_port: int, kills: Kills, **settings: Any
) -> AsyncIterator[tuple[Supervised, Supervised]]:
    port, upstream = free_port(), f"http://127.0.0.1:{engine_port}"
    base = serve_environ(folder / "data", **settings)
    command = serve_command(port, [upstream], url)
    async with (
        Supervised(engine, upstream, "/health", log=folder / "engine.log") as replica,
        Supervised(
            command,
            f"http://127.0.0.1:{port}",
            "/readyz",
            log=folder / "gateway.log",
            environ=lambda life: base | failpoints(kills, life),
        ) as gateway,
    ):
        yield gateway, replica


async def crash_on_echo(folder: Path, url: str, load: Load, kills: Kills) -> dict[str, Any]:
    port = free_port()
    tokens = ModelTokens.load(ECHO_MODEL_DIR, name="echo")
    async with running(folder, url, echo_command(port, 500), port, kills) as (gateway, engine):
        return await crash(gateway, engine, load, kills, SEED, tokens)


async def crash_on_model(folder: Path, url: str, model_dir: Path, load: Load, kills: Kills) -> dict[str, Any]:
    port = free_port()
    tokens = ModelTokens.load(model_dir, name=model_dir.name)
    async with running(folder, url, engine_command(port, model_dir), port, kills) as (gateway, engine):
        return await crash(gateway, engine, load, kills, SEED, tokens)


async def test_every_commit_point_and_random_moments(tmp_path: Path, url: str) -> None:
    kills = Kills(points(COMMITS, [2]), gateway=1, engine_front=1)
    load = Load("echo", turns=30, sessions=4)
    result = await crash_on_echo(tmp_path, url, load, kills)
    assert result["turns"] >= load.turns


@pytest.mark.prove
@pytest.mark.model
async def test_the_real_engine_loses_its_model_process_and_its_front(tmp_path: Path, model_dir: Path) -> None:
    kills = Kills(points(["after_begin_commit", "before_finish_commit"], [3]), engine_front=1, engine_model=1)
    load = Load(model_dir.name, turns=16, sessions=4, max_output_tokens=6)
    url = f"sqlite:///{tmp_path}/turnkeep.db"
    result = await crash_on_model(tmp_path, url, model_dir, load, kills)
    assert result["turns"] >= load.turns


async def test_a_killed_gateway_leaves_an_incomplete_turn_and_a_session_that_works_at_once(
    tmp_path: Path, url: str
) -> None:
    port = free_port()
    async with (
        running(tmp_path, url, echo_command(port, 20), port, Kills(), lease_s=30) as (gateway, engine),
        httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as client,
    ):
        await engine.ready()
        await gateway.ready()
        await client.post("/v1/sessions", json={"id": "s", "model": "echo"})
        await _half_a_turn(client, "x" * 400)
        gateway.kill()
        assert await gateway.dead(1)
        await gateway.ready()
        (left,) = (await client.get("/v1/sessions/s/turns")).json()["data"]
        assert (left["status"], left["finish_reason"], left["output"]) == ("incomplete", None, [])
        began = time.monotonic()
        after = await client.post("/v1/sessions/s/turns", json={"input": "on"})
        assert after.json()["status"] == "completed", after.text
        assert time.monotonic() - began < 10, "it waited for the lease of the dead gateway"


async def test_another_gateway_takes_over_after_the_lease(tmp_path: Path, url: str) -> None:
    engine_port, port, other_port = free_port(), free_port(), free_port()
    upstream = f"http://127.0.0.1:{engine_port}"
    environ = serve_environ(tmp_path / "data", lease_s=3, lease_renew_s=1)
    gateways = [
        Supervised(
            serve_command(p, [upstream], url),
            f"http://127.0.0.1:{p}",
            "/readyz",
            log=tmp_path / f"gateway-{p}.log",
            environ=lambda life: environ,
            restart=False,
        )
        for p in (port, other_port)
    ]
    engine = Supervised(echo_command(engine_port, 20), upstream, "/health", log=tmp_path / "engine.log")
    async with (
        engine,
        gateways[0] as first,
        gateways[1] as second,
        httpx.AsyncClient(base_url=first.url, timeout=60, trust_env=False) as client,
        httpx.AsyncClient(base_url=second.url, timeout=60, trust_env=False) as other,
    ):
        await asyncio.gather(engine.ready(), first.ready(), second.ready())
        await client.post("/v1/sessions", json={"id": "s", "model": "echo"})
        await _half_a_turn(client, "x" * 400)
        first.kill()
        killed = time.monotonic()
        refused = 0
        while (answer := await other.post("/v1/sessions/s/turns", json={"input": "on"})).status_code == 409:
            assert answer.json()["error"]["code"] == "session_busy"
            refused += 1
            await asyncio.sleep(0.2)
        assert answer.json()["status"] == "completed", answer.text
        assert refused > 0, "the lease was not respected"
        assert time.monotonic() - killed < 3 + 4
        turns = (await other.get("/v1/sessions/s/turns")).json()["data"]
        assert [turn["status"] for turn in turns] == ["incomplete", "completed"]


async def _half_a_turn(client: httpx.AsyncClient, text: str) -> None:
    """Start a streamed turn and leave its stream after the third event, with most of the answer to come."""
    body = {"input": text, "stream": True, "max_output_tokens": 1000}
    async with client.stream("POST", "/v1/sessions/s/turns", json=body) as response:
        async for event in events_of(response):
            if event["sequence_number"] == 3:
                return


@pytest.mark.prove
@pytest.mark.model
@pytest.mark.timeout(3600)
async def test_two_hundred_turns_on_the_real_engine(tmp_path: Path, url: str, model_dir: Path) -> None:
    """The result is kept: bench/results/crash-DATABASE.json. TURNKEEP_CRASH_TURNS=N: fewer turns, and four kills."""
    database, turns = url.partition(":")[0], int(os.environ.get("TURNKEEP_CRASH_TURNS", "200"))
    kills = Kills(points(COMMITS, [1, 4]), gateway=6, engine_front=3, engine_model=3)
    if turns < 200:
        kills = Kills(points(["after_begin_commit", "before_finish_commit"], [2]), gateway=1, engine_model=1)
    load = Load(model_dir.name, turns=turns, sessions=4, max_output_tokens=8)
    result = await crash_on_model(tmp_path, url, model_dir, load, kills)
    test = "pytest -m prove tests/faults/test_crash.py"
    test = test if turns == 200 else f"TURNKEEP_CRASH_TURNS={turns} {test}"
    told = {"test": test, "database": database, "machine": machine(), **result}
    kept = ROOT / "bench" / "results" / f"crash-{database}.json"
    await asyncio.to_thread(kept.parent.mkdir, parents=True, exist_ok=True)
    await asyncio.to_thread(kept.write_text, json.dumps(told, indent=1) + "\n")
