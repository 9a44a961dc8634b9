"""Clients that leave, at every chunk and in every way; replicas that die; a gateway that is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson
import psutil
import pytest

from engines.echo import EchoEngine
from engines.remote.http import Upstream
from engines.remote.turnkeep import TurnkeepEngine
from gateway.commands.listening import listen
from tests.faults.processes import Supervised, echo_command, free_port, serve_command, serve_environ
from tests.gateway.live import Live, events_of, live_gateway

pytestmark = pytest.mark.anyio

TEXT = "the keeper writes the hour into the book at dusk"  # 48 bytes and the end: 13 deltas of 4 tokens
CHUNKS = 12  # left after 0 to 11 of them, so that some of the answer is to come
Way = Literal["fin", "rst"]
ROUTES_AND_WAYS = [
    ("session", "fin"),
    ("chat", "rst"),
    pytest.param("session", "rst", marks=pytest.mark.prove),
    pytest.param("chat", "fin", marks=pytest.mark.prove),
]


class RawClient:
    """One HTTP/1.1 request on a socket of our own, to be left in whatever way."""

    def __init__(self, url: str) -> None:
        self._at = ("127.0.0.1", int(url.rpartition(":")[2]))

    async def send(self, path: str, body: dict[str, Any], headers: dict[str, str], receive_buffer: int = 0) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, self._at)
        self._sock = sock
        data = orjson.dumps(body)
        lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{self._at[1]}", f"Content-Length: {len(data)}"]
        lines += ["Content-Type: application/json", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        await asyncio.get_running_loop().sock_sendall(sock, "\r\n".join(lines).encode() + data)

    async def read_pieces(self, count: int) -> None:
        """Until `count` pieces of text were received."""
        seen = b""
        while seen.count(b'"delta":"') + seen.count(b'"content":"') - seen.count(b'"content":""') < count:
            data = await asyncio.get_running_loop().sock_recv(self._sock, 65_536)
            assert data, "the gateway closed the stream"
            seen += data

    def leave(self, way: Way) -> None:
        if way == "rst":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


def request(route: str, session: str, rule: str, *, stream: bool = True) -> tuple[str, dict[str, Any], dict[str, str]]:
    """(path, body, headers) of a turn in `session`, by either API."""
    if route == "session":
        body = {"input": TEXT, "max_output_tokens": 200, "stream": stream, "on_disconnect": rule}
        return f"/v1/sessions/{session}/turns", body, {}
    messages = [{"role": "user", "content": TEXT}]
    headers = {"X-Session-Id": session, "X-Turnkeep-On-Disconnect": rule, "X-Turnkeep-History": "append"}
    body = {"model": "echo", "messages": messages, "max_tokens": 200, "stream": stream}
    return "/v1/chat/completions", body, headers


async def until_free(live: Live, session: str, within_s: float) -> None:
    """The session's turn has left the gateway, and with it the engine."""
    registry = live.app.state.gateway.registry
    until = time.monotonic() + within_s
    while registry.of_session("default", session) is not None:
        assert time.monotonic() < until, f"{session} still runs {within_s} s after its client left"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def gateway_that_is_left_clean(folder: Path, engine: EchoEngine) -> AsyncIterator[Live]:
    """As many tasks and sockets after as before, five database connections at most, nothing runs in the engine.

    The test's own client keeps no connection.
    """
    async with (
        live_gateway(folder, {"echo": engine}) as pooled,
        httpx.AsyncClient(
            base_url=pooled.url, timeout=30, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        ) as client,
    ):
        live = replace(pooled, client=client)
        await client.get("/v1/sessions")
        await asyncio.sleep(0.1)
        before, sockets = len(asyncio.all_tasks()), len(_sockets())
        yield live
        for _ in range(100):
            if len(asyncio.all_tasks()) <= before and len(_sockets()) <= sockets:
                break
            await asyncio.sleep(0.02)
        assert len(asyncio.all_tasks()) <= before, [task.get_name() for task in asyncio.all_tasks()]
        assert len(_sockets()) <= sockets, _sockets()
        connections = [file for file in psutil.Process().open_files() if file.path.endswith("turnkeep.db")]
        assert len(connections) <= 5, "one writes, four read"
        await _clean(live, engine)


def _sockets() -> list[Any]:
    return list(psutil.Process().net_connections(kind="tcp"))


async def _clean(live: Live, engine: EchoEngine) -> None:
    load = await engine.load()
    assert (load.running, load.kv_blocks_used) == (0, 0)
    assert load.kv_blocks_cached is not None
    assert load.kv_blocks_total is not None
    assert load.kv_blocks_cached <= load.kv_blocks_total
    assert [replica.in_flight for replica in live.app.state.gateway.fleet] == [0]


@pytest.mark.parametrize(("route", "way"), ROUTES_AND_WAYS)
async def test_who_leaves_a_stream_at_any_chunk_stops_the_engine_and_keeps_what_was_said(
    tmp_path: Path, route: str, way: Way
) -> None:
    engine = EchoEngine(tokens_per_s=40, prefill_tokens_per_s=400)
    async with gateway_that_is_left_clean(tmp_path, engine) as live:
        await asyncio.gather(*(leave_at(live, f"s{chunk}", chunk, route, "cancel", way) for chunk in range(CHUNKS)))
        assert (await engine.load()).running == 0
        for chunk in range(CHUNKS):
            (turn,) = await live.turns(f"s{chunk}", include="token_ids")
            assert (turn["status"], turn["finish_reason"]) == ("incomplete", "cancelled")
            said = turn["output"][0]["content"][0]["text"] if turn["output"] else ""
            assert TEXT.startswith(said)
            assert len(said) >= 4 * chunk, "less was kept than the client had"
            assert bytes(turn["tokens"]["output_ids"]) == said.encode()
            after = (await live.turn(f"s{chunk}", "on")).json()
            assert after["status"] == "completed"
            assert after["parent_id"] == (turn["id"] if said else None)
            if said:
                (_, following) = await live.turns(f"s{chunk}", include="token_ids")
                assert following["tokens"]["base_tokens"] == turn["tokens"]["path_tokens"]


@pytest.mark.parametrize(("route", "way"), ROUTES_AND_WAYS)
async def test_with_finish_the_turn_goes_on_and_can_be_resumed(tmp_path: Path, route: str, way: Way) -> None:
    engine = EchoEngine(tokens_per_s=80, prefill_tokens_per_s=400)
    async with gateway_that_is_left_clean(tmp_path, engine) as live:
        await asyncio.gather(*(leave_at(live, f"s{chunk}", chunk, route, "finish", way) for chunk in range(CHUNKS)))
        for chunk in range(CHUNKS):
            (turn,) = await live.turns(f"s{chunk}")
            assert (turn["status"], turn["output"][0]["content"][0]["text"]) == ("completed", TEXT)
            url = f"/v1/sessions/s{chunk}/turns/{turn['id']}/stream"
            async with live.client.stream("GET", url, params={"starting_after": chunk}) as response:
                events = [event async for event in events_of(response)]
            assert [e["sequence_number"] for e in events] == list(range(chunk + 1, chunk + 1 + len(events)))
            assert events[-1]["type"] == "session.turn.completed"


async def leave_at(live: Live, session: str, chunk: int, route: str, rule: str, way: Way) -> None:
    """Leave after `chunk` pieces; 0 is before the first token, while the engine works on the prompt."""
    if route == "session":
        await live.session(id=session, model="echo")
    client = RawClient(live.url)
    await client.send(*request(route, session, rule))
    await until_running(live, session)
    if chunk:
        await client.read_pieces(chunk)
    client.leave(way)
    await until_free(live, session, 1.0 if rule == "cancel" else 10.0)


async def until_running(live: Live, session: str) -> None:
    for _ in range(500):
        if live.app.state.gateway.registry.of_session("default", session) is not None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the turn did not begin")


@pytest.mark.parametrize(("route", "way"), ROUTES_AND_WAYS)
@pytest.mark.parametrize("rule", ["cancel", "finish"])
async def test_who_leaves_a_request_that_is_not_streamed(tmp_path: Path, route: str, rule: str, way: Way) -> None:
    engine = EchoEngine(tokens_per_s=60)
    async with gateway_that_is_left_clean(tmp_path, engine) as live:
        if route == "session":
            await live.session(id="s", model="echo")
        client = RawClient(live.url)
        await client.send(*request(route, "s", rule, stream=False))
        await until_running(live, "s")
        await asyncio.sleep(0.2)
        client.leave(way)
        await until_free(live, "s", 1.0 if rule == "cancel" else 10.0)
        (turn,) = await live.turns("s")
        assert turn["status"] == ("incomplete" if rule == "cancel" else "completed")
        assert (await live.turn("s", "on")).json()["parent_id"] == turn["id"]


@pytest.mark.parametrize("rule", ["cancel", "finish"])
async def test_who_leaves_while_the_turn_begins_leaves_no_session_busy(tmp_path: Path, rule: str) -> None:
    engine = EchoEngine(tokens_per_s=200)
    async with gateway_that_is_left_clean(tmp_path, engine) as live:
        for number, pause_ms in enumerate(range(30)):
            session = f"s{number}"
            await live.session(id=session, model="echo")
            client = RawClient(live.url)
            await client.send(*request("session", session, rule))
            await asyncio.sleep(pause_ms / 2000)
            client.leave("rst")
        for number in range(30):
            until = time.monotonic() + 3
            while (answer := await live.turn(f"s{number}", "on")).status_code == 409:
                assert time.monotonic() < until, "a turn that nobody runs holds the session"
                await asyncio.sleep(0.05)
            assert answer.json()["status"] == "completed"
            statuses = {turn["status"] for turn in await live.turns(f"s{number}")}
            assert statuses <= {"completed"} if rule == "finish" else statuses <= {"completed", "incomplete"}


async def test_a_reader_that_does_not_read_costs_bounded_memory_and_nobody_else(tmp_path: Path) -> None:
    engine = EchoEngine(chunk_tokens=8)
    text = "x" * 120_000
    async with gateway_that_is_left_clean(tmp_path, engine) as live:
        await live.session(id="s", model="echo")
        gc.collect()
        before = psutil.Process().memory_info().rss
        client = RawClient(live.url)
        body = {"input": text, "max_output_tokens": 125_000, "stream": True, "temperature": 0}
        await client.send("/v1/sessions/s/turns", {**body, "max_output_tokens": 10_000}, {}, receive_buffer=4096)
        await until_running(live, "s")
        slowest = 0.0
        for _ in range(10):
            began = time.monotonic()
            assert (await live.client.get("/livez")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 1.0
        await until_free(live, "s", 30.0)  # on_disconnect finish: the turn does not wait for its reader
        assert psutil.Process().memory_info().rss - before < 64 << 20
        client.leave("rst")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such option")
def test_a_connection_whose_window_stays_closed_is_ended() -> None:
    with listen("127.0.0.1", 0, write_timeout_s=1.0) as listener, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(listener.getsockname())
        writer, _ = listener.accept()
        with writer:
            writer.settimeout(30)
            with pytest.raises(OSError, match="timed out") as ended:
                writer.sendall(bytes(64 << 20))
            assert ended.value.errno == errno.ETIMEDOUT, "the test's own limit came first"


@contextlib.asynccontextmanager
async def two_replicas(folder: Path, first_tokens_per_s: float) -> AsyncIterator[tuple[Live, Supervised]]:
    """A gateway before two engine processes, a at a pace of its own. b takes no turn until `admit` says so."""
    ports = (free_port(), free_port())
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    paces = (first_tokens_per_s, 2000.0)
    async with contextlib.AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                Supervised(echo_command(port, pace), url, "/health", log=folder / f"engine-{port}", restart=False)
            )
            for port, pace, url in zip(ports, paces, urls, strict=True)
        ]
        await asyncio.gather(*(replica.ready() for replica in replicas))
        engines = {name: TurnkeepEngine(Upstream(url, name=name)) for name, url in zip("ab", urls, strict=True)}
        live = await stack.enter_async_context(live_gateway(folder, engines))
        answer = await live.client.post("/admin/v1/replicas/b/drain")  # as the database has it the gateway keeps it
        assert answer.status_code == 202, answer.text
        yield live, replicas[0]


async def admit(live: Live) -> None:
    answer = await live.client.post("/admin/v1/replicas/b/undrain")
    assert answer.json()["state"] == "ready", answer.text


async def test_a_replica_killed_before_its_first_byte_costs_nothing_but_time(tmp_path: Path) -> None:
    async with two_replicas(tmp_path, 0.1) as (live, doomed):
        await live.session(id="s", model="echo")
        asked = asyncio.create_task(live.turn("s", TEXT))
        while not live.app.state.gateway.fleet.get("a").in_flight:  # noqa: ASYNC110 - pytest's own limit ends it
            await asyncio.sleep(0.01)
        await admit(live)
        await asyncio.sleep(0.3)
        doomed.kill()
        turn = (await asked).json()
        assert (turn["status"], turn["output"][0]["content"][0]["text"]) == ("completed", TEXT)
        assert (turn["placement"]["replica"], turn["placement"]["reason"]) == ("b", "failover")
        assert [one["id"] for one in await live.turns("s")] == [turn["id"]]
        after = (await live.turn("s", "on")).json()
        assert (after["placement"]["replica"], after["placement"]["reason"]) == ("b", "pinned")


@pytest.mark.parametrize("chunk", [1, 4, 9])
async def test_a_replica_killed_in_mid_stream_costs_no_byte(tmp_path: Path, chunk: int) -> None:
    text = " and ".join([TEXT] * 4)  # ten seconds of it are to come when a dies, however slow the machine
    async with two_replicas(tmp_path, 15) as (live, doomed):
        await live.session(id="s", model="echo")
        body = {"input": text, "stream": True, "max_output_tokens": 400}
        events: list[dict[str, Any]] = []
        async with live.client.stream("POST", "/v1/sessions/s/turns", json=body) as response:
            async for event in events_of(response):
                if not events:
                    await admit(live)
                events.append(event)
                if len(events) == chunk + 1:
                    doomed.kill()
        assert events[-1]["type"] == "session.turn.completed"
        assert "".join(event.get("delta", "") for event in events) == text
        (move,) = events[-1]["turn"]["metadata"]["continued"]
        assert (move["from"], move["to"], move["reason"]) == ("a", "b", "lost")
        (turn,) = await live.turns("s")
        assert (turn["status"], turn["placement"]["replica"], len(turn["output"])) == ("completed", "b", 1)


async def test_sigterm_under_load_loses_no_acknowledged_turn_and_ends_with_0(tmp_path: Path) -> None:
    engine_port, port = free_port(), free_port()
    upstream, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}"
    environ = serve_environ(tmp_path / "data", grace_s=10)
    command = serve_command(port, [upstream], f"sqlite:///{tmp_path}/turnkeep.db")

    def gateway() -> Supervised:
        return Supervised(
            command, url, "/readyz", log=tmp_path / "gateway.log", environ=lambda life: environ, restart=False
        )

    acknowledged: dict[str, list[str]] = {f"s{number}": [] for number in range(8)}

    async def talk(session: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            await client.post("/v1/sessions", json={"id": session, "model": "echo"})
            for number in itertools.count():
                try:
                    answer = await client.post(f"/v1/sessions/{session}/turns", json={"input": f"{TEXT} {number}"})
                except httpx.TransportError:
                    return
                if answer.status_code != 200:
                    assert answer.status_code == 503, answer.text
                    return
                assert answer.json()["status"] == "completed"
                acknowledged[session].append(answer.json()["id"])

    async with Supervised(echo_command(engine_port, 200), upstream, "/health", log=tmp_path / "engine.log") as engine:
        async with gateway() as first:
            await asyncio.gather(engine.ready(), first.ready())
            talking = [asyncio.create_task(talk(session)) for session in acknowledged]
            await asyncio.sleep(2.0)
            first.send(signal.SIGTERM)
            assert await first.dead(1, within_s=20)
            assert first.codes == [os.EX_OK], (tmp_path / "gateway.log").read_text()[-3000:]
            await asyncio.gather(*talking)
        assert sum(map(len, acknowledged.values())) > 8
        async with gateway() as second, httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            await second.ready()
            for session, ids in acknowledged.items():
                found = (await client.get(f"/v1/sessions/{session}/turns", params={"limit": 100})).json()["data"]
                completed = [turn["id"] for turn in found if turn["status"] == "completed"]
                assert completed[: len(ids)] == ids
                assert len(completed) <= len(ids) + 1, "one may have ended while its client was already gone"
                assert all(turn["status"] != "in_progress" for turn in found)
