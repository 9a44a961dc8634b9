"""Engine processes and gateways on one database, started for a test, and what their API shows of the replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.faults.processes import Supervised, free_port, serve_command, serve_environ

ROUTE = "/admin/v1/replicas"


@dataclass(frozen=True)
class Rig:
    engines: list[Supervised]  # a, b, c, ... as the gateways call them
    gateways: list[Supervised]
    clients: list[httpx.AsyncClient]  # one a gateway

    async def shown(self, name: str, at: int = 0) -> dict[str, Any]:
        answer = await self.clients[at].get(f"{ROUTE}/{name}")
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def until(self, name: str, state: str, at: int = 0, within_s: float = 60.0) -> float:
        """Seconds until this gateway shows it so."""
        began = time.monotonic()
        while (told := await self._state(name, at)) != state:
            assert time.monotonic() < began + within_s, (told, await self.shown(name, at))
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def everywhere(self, name: str, state: str, within_s: float = 60.0) -> float:
        """Seconds until every gateway shows it so."""
        return max(await asyncio.gather(*(self.until(name, state, at, within_s) for at in range(len(self.clients)))))

    async def _state(self, name: str, at: int) -> str:
        answer = await self.clients[at].get(f"{ROUTE}/{name}")
        return str(answer.json()["state"]) if answer.status_code == 200 else "gone"


@asynccontextmanager
async def started(
    folder: Path,
    database: str,
    command: Callable[[int], Sequence[str]],
    *,
    engines: Sequence[str],
    named: Sequence[str] | None = None,
    gateways: int = 2,
) -> AsyncIterator[Rig]:
    """`command`: of an engine, by its port. `named`: the engines of the settings; None: all of them."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        running = {}
        for name in engines:
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            running[name] = await enter(Supervised(command(port), url, "/health", log=folder / f"engine-{name}"))
        in_settings = engines if named is None else named
        upstreams = ", ".join(f'{{"url": "{running[name].url}", "name": "{name}"}}' for name in in_settings)
        environ = serve_environ(folder / "data", upstreams=f"[{upstreams}]")
        serving, clients = [], []
        for number in range(gateways):
            port = free_port()
            serving.append(
                await enter(
                    Supervised(
                        serve_command(port, [], database),
                        f"http://127.0.0.1:{port}",
                        "/readyz",
                        log=folder / f"gateway-{number}",
                        environ=lambda life: environ,
                    )
                )
            )
        await asyncio.gather(*(one.ready() for one in (*running.values(), *serving)))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # none is closed under a request
        for gateway in serving:
            clients.append(  # noqa: PERF401 - each is entered
                await enter(httpx.AsyncClient(base_url=gateway.url, timeout=120, trust_env=False, limits=limits))
            )
        rig = Rig(list(running.values()), serving, clients)
        for name in in_settings:
            await rig.everywhere(name, "ready")
        yield rig
