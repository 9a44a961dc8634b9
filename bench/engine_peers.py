"""Engines that `bench.engine` asks the same of: ours, and peers in processes of their own. Arrivals are stamped here.

A peer that is not there is none, with the reason; nothing is installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import free_port
from bench.processes import python, started
from bench.talk import Answer, Asker, Client
from engines.contract import Engine, IdsPrompt
from engines.local.model_process import WAIT_POLICY
from engines.remote.http import Timeouts, Upstream
from engines.remote.llamacpp import LlamaCppEngine
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.vllm import VllmEngine

PEER = Path(__file__).with_name("peer.py")
PATIENCE = Timeouts(first_delta_s=1200.0, idle_s=600.0)
BLOCK = 32
START_S = 300.0


@dataclass(frozen=True, slots=True)
class Room:
    """How much K/V an engine may hold on its device, tokens; None: as it likes. `host_bytes` beside it if it can."""

    tokens: int | None = None
    host_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """How to reach an engine for one row; entered, it gives what to ask, for a length of answers."""

    name: str
    command: Sequence[str]  # as it was started, for the output
    start: Callable[[Room], Any]  # -> async context manager of Callable[[int], Asker]


@dataclass(slots=True)
class LinesProcess:
    """bench/peer.py: one process, any number of requests at once."""

    process: asyncio.subprocess.Process
    _waiting: dict[int, asyncio.Queue[tuple[float, list[int]] | None]] = field(default_factory=dict)
    _last: int = 0

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            now = time.perf_counter()
            said = json.loads(line)
            self._waiting[said["id"]].put_nowait(None if "done" in said else (now, said["new"]))
        for queue in self._waiting.values():
            queue.put_nowait(None)

    async def ask(self, ids: Sequence[int], count: int) -> Answer:
        self._last += 1
        number, queue = self._last, self._waiting.setdefault(self._last, asyncio.Queue())
        assert self.process.stdin is not None
        asked = time.perf_counter()
        self.process.stdin.write(json.dumps({"id": number, "ids": list(ids), "count": count}).encode() + b"\n")
        made: list[int] = []
        arrivals: list[float] = []
        while (came := await queue.get()) is not None:
            made += came[1]
            arrivals += [came[0]] * len(came[1])
        del self._waiting[number]
        if len(made) != count:
            raise RuntimeError(f"the peer gave {len(made)} tokens, {count} were asked for")
        return Answer(asked, tuple(arrivals), 0.0, tuple(made), len(ids), None)


@dataclass(frozen=True, slots=True)
class LinesClient:
    lines: LinesProcess
    reply_tokens: int

    async def ask(self, prompt: IdsPrompt, *, name: str, salt: str) -> Answer:
        whole = await prompt.whole()
        return await self.lines.ask(memoryview(whole).cast("I").tolist(), self.reply_tokens)


def lines_peer(name: str, interpreter: str, kind: str, model: Path, threads: int | None) -> Peer:
    def command(room: Room) -> list[str]:
        options = {"threads": threads, "blocks": -(-room.tokens // BLOCK) if room.tokens else 0}
        return [interpreter, str(PEER), kind, str(model), json.dumps(options)]

    @asynccontextmanager
    async def start(room: Room) -> AsyncIterator[Callable[[int], Asker]]:
        environ = {**os.environ, "OMP_WAIT_POLICY": WAIT_POLICY}
        environ.pop("PYTHONPATH", None)
        process = await asyncio.create_subprocess_exec(
            *command(room), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, limit=1 << 24
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not await asyncio.wait_for(process.stdout.readline(), START_S):
                raise RuntimeError(f"{name} did not start")
            lines = LinesProcess(process)
            reading = asyncio.create_task(lines.read())
            yield lambda count: LinesClient(lines, count)
            reading.cancel()
        finally:
            process.stdin.close()
            if process.returncode is None:
                process.kill()
            await process.wait()

    return Peer(name, command(Room()), start)


def turnkeep_peer(name: str, folder: Path, model: Path, threads: int | None, bytes_per_token: int, *more: str) -> Peer:
    """Our own engine, over its wire; `more` options of `turnkeep engine`."""

    def command(room: Room) -> list[str]:
        pool = (room.tokens // BLOCK + 1) * BLOCK * bytes_per_token if room.tokens else 1 << 30
        options = ["--model", str(model), "--port", "0", "--pool-bytes", str(pool), "--device", "cpu"]
        options += [
            "--dtype",
            "float32",
            "--exit-with-parent",
            *(["--threads", str(threads)] if threads else []),
            *more,
        ]
        options += ["--host-bytes", str(room.host_bytes)] if room.host_bytes else []
        return python("gateway.cli", "engine", *options)

    @asynccontextmanager
    async def start(room: Room) -> AsyncIterator[Callable[[int], Asker]]:
        with started(command(room), folder=folder, ready='"event":"ready"') as running:
            ready = json.loads(next(line for line in running.said.splitlines() if '"event":"ready"' in line))
            async with _client(TurnkeepEngine(_upstream(ready["url"])), ready["model"], running.cpu_s) as made:
                yield made

    return Peer(name, command(Room()), start)


def llamacpp_peer(server: Path, gguf: Path, folder: Path, threads: int | None, sessions: int) -> Peer:
    """llama.cpp's server with split slots, one for each of `sessions`, and its own host cache as it comes."""

    def command(room: Room, port: int) -> list[str]:
        tokens = room.tokens or 2048 * sessions
        return [
            *(
                str(server),
                "-m",
                str(gguf),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "-no-kvu",
                "-np",
                str(sessions),
            ),
            *("-c", str(tokens), "-t", str(threads or os.cpu_count())),
        ]

    @asynccontextmanager
    async def start(room: Room) -> AsyncIterator[Callable[[int], Asker]]:
        port = free_port()
        with started(command(room, port), folder=folder, ready="server is listening|listening on") as running:
            engine = LlamaCppEngine(_upstream(f"http://127.0.0.1:{port}"))
            async with _client(engine, gguf.name, running.cpu_s) as made:
                yield made

    return Peer("llamacpp", command(Room(), 0), start)


def vllm_peer(url: str, model: str) -> Peer:
    """A vLLM server that runs already, with the room that it was given."""

    @asynccontextmanager
    async def start(room: Room) -> AsyncIterator[Callable[[int], Asker]]:
        async with _client(VllmEngine(_upstream(url)), model, lambda: 0.0) as made:
            yield made

    return Peer("vllm", [url], start)


def has_module(interpreter: str, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([interpreter, "-c", code], capture_output=True, check=False).returncode == 0


def this_interpreter() -> str:
    return sys.executable


@asynccontextmanager
async def _client(engine: Engine, model: str, cpu_s: Callable[[], float]) -> AsyncIterator[Callable[[int], Asker]]:
    try:
        yield lambda count: Client(engine, model, count, cpu_s)
    finally:
        await engine.aclose()


def _upstream(url: str) -> Upstream:
    return Upstream(url, timeouts=PATIENCE)
