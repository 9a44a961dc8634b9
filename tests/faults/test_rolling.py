"""Two gateways on one database are replaced one after the other while 200 streams run: none is cut, no byte is doubled.

python -m pytest -m prove tests/faults/test_rolling.py
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.processes import Supervised, echo_command, free_port, machine, serve_command, serve_environ
from tests.gateway.live import events_of

pytestmark = [pytest.mark.anyio, pytest.mark.postgres, pytest.mark.prove, pytest.mark.timeout(900)]


STREAMS = 200
SENTENCE = "the keeper writes the hour into the book, 世界 👩‍👩‍👧; "
TOKENS_PER_S = 5.0  # of each stream
ROLLING = Path(__file__).parents[2] / "bench" / "results" / "rolling.json"
TERMINAL = ("session.turn.completed", "session.turn.incomplete", "session.turn.failed")


@dataclass
class Reader:
    """One client: follows its turn to the end, at another gateway when its stream ends before."""

    clients: list[httpx.AsyncClient]
    at: int
    text: str
    events: list[dict[str, Any]] = field(default_factory=list)
    resumed: int = 0
    told_to: int = 0  # of these, by the gateway's word
    longest_gap_s: float = 0.0

    async def read(self) -> None:
        await asyncio.sleep(self.at * 0.03)  # a storm of sessions is another test's
        made = await self._client().post("/v1/sessions", json={"model": "echo"})
        assert made.status_code == 201, made.text
        path = f"/v1/sessions/{made.json()['id']}/turns"
        body = {"input": self.text, "stream": True, "max_output_tokens": 2000}
        last = time.monotonic()
        while not self.events or self.events[-1]["type"] not in TERMINAL:
            try:
                async for event in self._stream(path, body):
                    self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last)
                    last = time.monotonic()
                    if event["type"] == "session.turn.handed_over":
                        self.told_to += 1
                        continue
                    self.events.append(event)
            except httpx.TransportError:
                pass
            if self.events and self.events[-1]["type"] in TERMINAL:
                return
            self.resumed += 1
            self.at += 1
            await asyncio.sleep(0.05)

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        client = self._client()
        if self.events:
            turn = self.events[0]["turn"]["id"]
            headers = {"last-event-id": str(self.events[-1]["sequence_number"])}
            asked = client.stream("GET", f"{path}/{turn}/stream", headers=headers)
        else:
            asked = client.stream("POST", path, json=body)
        async with asked as response:
            if response.status_code == 200:
                async for event in events_of(response):
                    yield event

    def _client(self) -> httpx.AsyncClient:
        return self.clients[self.at % len(self.clients)]


async def test_two_gateways_are_rolled_under_200_streams(tmp_path: Path, postgres_url: str) -> None:
    engine_port, ports = free_port(), (free_port(), free_port())
    upstream = f"http://127.0.0.1:{engine_port}"
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        command = echo_command(engine_port, TOKENS_PER_S)
        engine = await enter(Supervised(command, upstream, "/health", log=tmp_path / "engine.log"))
        gateways = []
        for port in ports:
            environ = serve_environ(tmp_path / "data", grace_s=1.0, handover_s=10)
            gateways.append(
                await enter(
                    Supervised(
                        serve_command(port, [upstream], postgres_url),
                        f"http://127.0.0.1:{port}",
                        "/readyz",
                        log=tmp_path / f"gateway-{port}.log",
                        environ=lambda life, environ=environ: environ,  # type: ignore[misc]
                    )
                )
            )
        await asyncio.gather(engine.ready(), *(gateway.ready() for gateway in gateways))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        clients = [
            await enter(httpx.AsyncClient(base_url=g.url, timeout=60, trust_env=False, limits=limits)) for g in gateways
        ]
        readers = [Reader(clients, at, f"{at}: " + SENTENCE * 6) for at in range(STREAMS)]
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        rolls = []
        await asyncio.sleep(10.0)
        for gateway in gateways:
            life, at = gateway.lives, time.monotonic()
            gateway.send(signal.SIGTERM)
            assert await gateway.dead(life, within_s=120)
            rolls.append(round(time.monotonic() - at, 2))
            await gateway.ready()
        assert not all(task.done() for task in reading), "the streams outlived neither of the rolls"
        await asyncio.gather(*reading)
        codes = [code for gateway in gateways for code in gateway.codes]
        ends = Counter(str(reader.events[-1]["turn"].get("error") or reader.events[-1]["type"]) for reader in readers)
        logs = [(tmp_path / f"gateway-{port}.log").read_text()[-6000:] for port in ports]
        assert ends == {"session.turn.completed": STREAMS}, (ends, logs)
        handed = await _handed(clients[0], readers)
    assert codes == [os.EX_OK, os.EX_OK]
    for reader in readers:
        assert [event["sequence_number"] for event in reader.events] == list(range(1, len(reader.events) + 1))
        assert reader.events[-1]["type"] == "session.turn.completed"
        assert "".join(event.get("delta", "") for event in reader.events) == reader.text
    result = {
        "streams": STREAMS,
        "cut": sum(reader.events[-1]["type"] != "session.turn.completed" for reader in readers),
        "doubled_bytes": 0,  # the texts are equal, event by event
        "handed_over": dict(sorted(Counter(handed).items())),
        "resumed": sum(reader.resumed for reader in readers),
        "told_where_to_ask": sum(reader.told_to for reader in readers),
        "longest_gap_s": round(max(reader.longest_gap_s for reader in readers), 2),
        "sigterm_to_exit_s": rolls,
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine(),
    }
    print(json.dumps(result))
    assert sum(count for count in handed) >= STREAMS / 2
    ROLLING.parent.mkdir(parents=True, exist_ok=True)
    ROLLING.write_text(json.dumps(result, indent=1) + "\n")


async def _handed(client: httpx.AsyncClient, readers: list[Reader]) -> list[int]:
    """How often each turn was handed over; and that its session goes on."""
    counts = []
    for reader, number in zip(readers, itertools.count()):
        turn = reader.events[-1]["turn"]
        counts.append(len(turn["metadata"].get("handed_over", ())))
        assert turn["usage"]["output_tokens"] == len(reader.text.encode()) + 1
        if number % 20 == 0:
            answer = await client.post(f"/v1/sessions/{turn['session_id']}/turns", json={"input": "on"})
            assert answer.json()["prefix_report"]["reused_tokens"] > len(reader.text.encode())
    return counts
