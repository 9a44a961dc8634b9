"""Real processes for the fault tests: `turnkeep serve` and engines, started again at once whenever they die.

async with Supervised("gateway", serve_command(...), url, "/readyz", log=folder / "gateway.log") as gateway:
    gateway.kill()                 # SIGKILL; a new life starts by itself
    await gateway.ready()
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from tests.faults.forked import Forked

ROOT = Path(__file__).parents[2]
START_S = 120.0  # a loaded machine, a real model


def free_port() -> int:
    """Below the range from which the kernel takes the ports of outgoing connections.

    One of those could take the port of a process that is dead just now, and it could not be started again.
    """
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def serve_command(port: int, upstreams: Sequence[str], database: str) -> list[str]:
    upstream = [word for url in upstreams for word in ("--upstream", url)]
    words = ["serve", "--host", "127.0.0.1", "--port", str(port), *upstream, "--database", database]
    return [sys.executable, "-m", "gateway.cli", *words]


def serve_environ(data_dir: Path, **settings: Any) -> dict[str, str]:
    given = {"auth": "false", "data_dir": data_dir, "log_level": "warning", **settings}
    return {f"TURNKEEP_{name.upper()}": str(value) for name, value in given.items()}


def echo_command(port: int, tokens_per_s: float) -> list[str]:
    return [sys.executable, "-m", "tests.faults.slow_echo", str(port), str(tokens_per_s)]


def faulty_command(port: int, tokens_per_s: float) -> list[str]:
    return [sys.executable, "-m", "tests.faults.faulty_echo", str(port), str(tokens_per_s)]


def told_command(port: int, told: Path, model: str = "echo") -> list[str]:
    return [sys.executable, "-m", "tests.faults.told_echo", str(port), str(told), model]


def engine_command(port: int, model: Path) -> list[str]:
    words = ["engine", "--model", str(model), "--port", str(port), "--threads", "1", "--pool-bytes", str(256 << 20)]
    return [sys.executable, "-m", "gateway.cli", *words]


class Supervised:
    """`environ(life)` gives the variables of each life, counted from 1. With `restart` False it may die for good."""

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        health: str,
        *,
        log: Path,
        environ: Callable[[int], Mapping[str, str]] = lambda life: {},
        restart: bool = True,
    ) -> None:
        self.command, self.url, self.health, self.log = list(command), url, health, log
        self.environ, self.restart = environ, restart
        self.lives = 0
        self.codes: list[int] = []  # how each life ended
        self.process: Forked | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def children(self) -> list[int]:
        """Process ids below this one: the engine's model process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        return []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep_running())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        assert self._task is not None
        if self.process is not None and self.process.returncode is None:
            for pid in (self.pid, *self.children()):
                self.send(signal.SIGCONT, pid)
                self.send(signal.SIGKILL, pid)
        await self._task

    async def _keep_running(self) -> None:
        base = {name: value for name, value in os.environ.items() if not name.startswith("TURNKEEP_")}
        while not self._closing:
            self.lives += 1
            environ = base | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | self.environ(self.lives)
            self.process = Forked(self.command, environ, self.log.parent, self.log)
            self.codes.append(await self.process.wait())
            if not self.restart:
                return

    def send(self, number: int, pid: int | None = None) -> None:
        """A signal; to a process that is gone already, nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    async def dead(self, life: int, within_s: float = 30.0) -> bool:
        """Whether life number `life` ended within that time."""
        for _ in range(int(within_s / 0.02)):
            if len(self.codes) >= life:
                return True
            await asyncio.sleep(0.02)
        return False

    async def ready(self) -> None:
        async with httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=5) as client:
            for _ in range(int(START_S / 0.05)):
                try:
                    if (await client.get(self.health)).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                assert self.restart or self.process is None or self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)
        raise AssertionError(f"not ready after {START_S} s: {self.log.read_text()[-3000:]}")


def machine() -> dict[str, Any]:
    """What a result was measured on."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }
