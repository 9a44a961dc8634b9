"""The real model in a small window: a conversation passes it, is compacted, and goes on; with and without KV shift."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.processes import Supervised, engine_command, free_port, serve_command, serve_environ

pytestmark = [pytest.mark.anyio, pytest.mark.model, pytest.mark.timeout(600)]
WINDOW = 512
FACTS = [
    "My name is Priya and I travel to Lisbon in May with two kids.",
    "The hotel booking code is LX-4471-B, in the Alfama district.",
    "My husband Tom joins on May 14, his flight is TP1352.",
    "We have a budget of 3200 euros and I am allergic to shellfish.",
    "The kids like trams; please keep the first morning free.",
    "Our dog Bruno stays with my sister Anna in Porto.",
]


@pytest.fixture
async def client(tmp_path: Path, model_dir: Path) -> AsyncIterator[httpx.AsyncClient]:
    port, engine_port = free_port(), free_port()
    upstream, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}"
    command = [*engine_command(engine_port, model_dir), "--window", str(WINDOW)]
    environ = serve_environ(tmp_path / "data")
    async with (
        Supervised(command, upstream, "/health", log=tmp_path / "engine.log") as engine,
        Supervised(
            serve_command(port, [upstream], f"sqlite:///{tmp_path}/turnkeep.db"),
            url,
            "/readyz",
            log=tmp_path / "gateway.log",
            environ=lambda life: environ,
        ) as gateway,
        httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client,
    ):
        await engine.ready()
        await gateway.ready()
        yield client


async def turn(client: httpx.AsyncClient, session: str, text: str) -> dict[str, Any]:
    body = {"input": text, "temperature": 0, "max_output_tokens": 6}
    for _ in range(100):
        answer = await client.post(f"/v1/sessions/{session}/turns", json=body)
        if answer.status_code != 503:
            break
        await asyncio.sleep(0.3)  # the gateway is still reading the model's tokenizer
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def settled(client: httpx.AsyncClient, session: str) -> list[dict[str, Any]]:
    """Its compactions, once none runs: in the background they wait while turns come without a pause."""
    for _ in range(400):
        rows: list[dict[str, Any]] = (await client.get(f"/v1/sessions/{session}/compactions")).json()["data"]
        if all(row["status"] != "running" for row in rows):
            return rows
        await asyncio.sleep(0.3)
    raise AssertionError(f"a compaction does not end: {rows}")


async def test_a_conversation_outgrows_the_window_and_keeps_its_identifiers(
    client: httpx.AsyncClient,
) -> None:
    policy = {"max_output_tokens": 6, "strategy": "extract"}
    await client.post("/v1/sessions", json={"id": "s", "system": "You are a travel agent.", "policy": policy})
    for number in range(14):
        await turn(client, "s", FACTS[number] if number < len(FACTS) else f"What do you say to plan {number}?")
    rows = await settled(client, "s")
    assert sum(row["status"] == "committed" for row in rows) >= 1, rows
    assert {row["status"] for row in rows} <= {"committed", "skipped"}, rows
    context = (await client.get("/v1/sessions/s/context")).json()
    shown = "\n".join(str(message["content"]) for message in context["messages"])
    assert context["prompt_tokens"] < WINDOW
    assert [code for code in ("LX-4471-B", "TP1352", "3200") if code not in shown] == []


@pytest.mark.prove
async def test_a_turn_right_after_a_cut_may_take_shifted_kv_and_says_so(client: httpx.AsyncClient) -> None:
    policy = {"mode": "manual", "strategy": "extract", "kv_shift": True, "keep_last": 7}
    await client.post("/v1/sessions", json={"id": "s", "policy": policy})
    compacted: dict[str, Any] = {}
    for number in range(30):
        answered = await turn(client, "s", FACTS[number % len(FACTS)] + f" This is note {number}.")
        if "compaction" in answered["metadata"]:
            compacted = answered
            break
    assert compacted, "the window was never full"
    assert compacted["metadata"]["approximate"] is True
    assert compacted["usage"]["shifted_tokens"] > 64
    for _ in range(2):
        following = await turn(client, "s", "Thank you.")
        assert "shifted_tokens" not in following["usage"]
        assert "approximate" not in following["metadata"]
