"""A gateway on a real socket in a thread of its own: one for a whole module of plain tests, with what they look at."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvloop

from engines.contract import Engine
from gateway.api.state import Gateway
from gateway.secrets import load_secret
from gateway.tenancy import USER_SCOPES, new_key
from tests.gateway.live import Live, live_gateway

T = TypeVar("T")
KEPT = (
    "sessions",
    "session_metadata",
    "turns",
    "items",
    "events",
    "compactions",
    "erasures",
    "forgettings",
    "api_keys",
    "tenants",
    "replicas",
)


@dataclass(frozen=True)
class Served:
    """`client` sends nothing but what it is told; `gateway` is looked at from the test's own thread."""

    live: Live
    client: httpx.Client
    folder: Path
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.live.url

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    @property
    def gateway(self) -> Gateway:
        found: Gateway = self.live.app.state.gateway
        return found

    def within(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaited in the gateway's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def rows(self) -> dict[str, int]:
        """How many rows each table holds."""
        with closing(sqlite3.connect(f"file:{self.folder}/turnkeep.db?mode=ro", uri=True)) as database:
            return {name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in KEPT}

    def key(
        self,
        *,
        tenant: str = "default",
        scopes: frozenset[str] = USER_SCOPES,
        expires_at: float | None = None,
        revoked: bool = False,
    ) -> dict[str, str]:
        """A header with a new API key."""
        secret = load_secret(self.gateway.settings)
        key, record = new_key(
            secret, tenant_id=tenant, name="test", scopes=scopes, now=time.time(), expires_at=expires_at
        )
        self.within(self.gateway.store.add_key(record))
        if revoked:
            self.within(self.gateway.store.revoke_key(record.tenant_id, record.id))
        return {"authorization": f"Bearer {key}"}

    def session(self, headers: Mapping[str, str] = {}, **fields: Any) -> str:
        answer = self.client.post("/v1/sessions", json=fields, headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def turn(self, session_id: str, input: Any, headers: Mapping[str, str] = {}, **more: Any) -> dict[str, Any]:
        body = {"input": input, "max_output_tokens": 16, **more}
        answer = self.client.post(f"/v1/sessions/{session_id}/turns", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told


@contextmanager
def served(folder: Path, engines: Mapping[str, Engine] | None = None, **settings: Any) -> Iterator[Served]:
    """Up until the context ends; what goes wrong while it stops is raised here."""
    ready: Future[tuple[Live, asyncio.AbstractEventLoop, Callable[[], object]]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with live_gateway(folder, engines, **settings) as live:
            ready.set_result((live, loop, lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    ended: Future[None] = Future()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:  # noqa: BLE001 (raised again in the test's thread)
            (ended if ready.done() else ready).set_exception(error)
        else:
            ended.set_result(None)

    thread = threading.Thread(target=run, name="gateway", daemon=True)
    thread.start()
    live, loop, stop = ready.result(30)
    try:
        with httpx.Client(base_url=live.url, timeout=30, trust_env=False) as client:
            yield Served(live, client, folder, loop)
    finally:
        stop()
        thread.join(15)
    ended.result(0)


@contextmanager
def loop_turns(url: str, *, within_s: float = 0.2) -> Iterator[list[float]]:
    """`/livez` asked all the while from another thread: every answer comes within `within_s`."""
    took: list[float] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            while not done.is_set():
                at = time.perf_counter()
                assert client.get("/livez").status_code == 200
                took.append(time.perf_counter() - at)
                time.sleep(0.01)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    try:
        yield took
    finally:
        done.set()
        asker.join(30)
    assert took, "livez was never answered"
    assert max(took) < within_s, f"livez took {max(took):.3f} s of at most {within_s}"


def until(holds: Callable[[], object], within_s: float = 30.0) -> None:
    """Waits for a state."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not so within {within_s} s"
        time.sleep(0.02)
