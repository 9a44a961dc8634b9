"""The doors of a kept session, over a real engine: suspend, resume, and a file that goes to another replica."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from engines.local.backend import ModelInfo, Status
from engines.local.engine import LocalEngine
from engines.local.in_process import InProcess
from engines.local.refusal import Refusal
from engines.local.server import Limits, create_app
from engines.local.session_doors import CONTENT_TYPE
from tests.engines.local.test_disk_tier import closing, engine_on
from tests.engines.local.test_suspension import ROOM, a_talk, ask, goes_on
from tests.engines.local.tiny import tiny_engine

INFO = ModelInfo("tiny", Path(), 320, 64, 8, "cpu", "float32", "e")
AT = "/turnkeep/v1/sessions/s"


class Direct:
    """A Backend whose engine is stepped where it is called."""

    state, info = "ok", INFO

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine

    async def status(self) -> Status:
        return Status()

    async def suspend(self, session: str, salt: str, to: str | None) -> dict[str, Any]:
        return self._answer("suspend", session, salt, to)

    async def resume(self, session: str, salt: str) -> dict[str, Any]:
        return self._answer("resume", session, salt)

    async def save(self, session: str, salt: str) -> dict[str, Any]:
        return self._answer("save", session, salt)

    async def adopt(self, path: Path, session: str, salt: str) -> dict[str, Any]:
        return self._answer("adopt", path, session, salt)

    def _answer(self, what: str, *args: Any) -> dict[str, Any]:
        answer = ask(self.engine, what, *args)
        if isinstance(answer, Refusal):
            raise answer
        told: dict[str, Any] = answer
        return told


def client(engine: LocalEngine, folder: Path | None, limits: Limits | None = None) -> httpx.AsyncClient:
    app = create_app(Direct(engine), clock=float, now=float, kv_dir=folder, limits=limits)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


def test_a_session_is_suspended_and_resumed(tmp_path: Path) -> None:
    async def run(engine: LocalEngine) -> list[httpx.Response]:
        async with client(engine, tmp_path) as http:
            return [await http.post(f"{AT}/{what}?salt=t") for what in ("suspend", "resume", "resume")]

    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        talk = a_talk(engine)
        suspended, *resumed = asyncio.run(run(engine))
        assert (suspended.status_code, suspended.json()["tier"]) == (200, "disk")
        assert [answer.json()["host"] for answer in resumed] == [10, 10]
        assert goes_on(talk, engine) == 0


def test_a_session_goes_to_another_replica_as_a_file(tmp_path: Path) -> None:
    async def run(one: LocalEngine, two: LocalEngine) -> httpx.Response:
        async with client(one, tmp_path / "1") as here, client(two, tmp_path / "2") as there:
            file = await here.get(f"{AT}/kv?salt=t")
            assert (file.status_code, file.headers["content-type"]) == (200, CONTENT_TYPE)
            return await there.put(f"{AT}/kv?salt=t", content=file.content, headers={"content-type": CONTENT_TYPE})

    with closing(engine_on(tmp_path / "1", pages=40, host_bytes=ROOM)) as one:
        talk = a_talk(one)
        with closing(engine_on(tmp_path / "2", pages=40, host_bytes=ROOM)) as two:
            assert asyncio.run(run(one, two)).json()["tokens"] == 75
            assert goes_on(talk, two) == 0
    assert not list(tmp_path.glob("*/*.part"))


def test_what_is_no_file_of_that_session_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def run(engine: LocalEngine) -> list[tuple[int, str]]:
        limits, kind = Limits(max_kv_bytes=5000), {"content-type": CONTENT_TYPE}
        async with client(engine, tmp_path, limits) as http, client(engine, None) as bare:
            answers = [
                await http.put(f"{AT}/kv?salt=t", content=b"x" * 3000, headers=kind),
                await http.put(f"{AT}/kv?salt=t", content=b"x" * 6000, headers=kind),
                await http.put(f"{AT}/kv?salt=t", content=b"x", headers={"content-type": "text/plain"}),
                await http.put(f"{AT}/kv?salt=!", content=b"x", headers=kind),
                await bare.put(f"{AT}/kv", content=b"x", headers=kind),
                await http.get("/turnkeep/v1/sessions/nobody/kv"),
                await http.post("/turnkeep/v1/sessions/nobody/suspend"),
            ]
        return [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]

    with closing(engine_on(tmp_path, pages=40, host_bytes=ROOM)) as engine:
        assert asyncio.run(run(engine)) == [
            (422, "kv_file_refused"),
            (413, "request_too_large"),
            (415, "unsupported_media_type"),
            (400, "invalid_request"),
            (501, "unsupported"),
            (404, "not_found"),
            (404, "not_found"),
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_an_engine_without_kv_says_so() -> None:
    async def run() -> list[int]:
        app = create_app(InProcess(tiny_engine(), INFO), clock=float, now=float, kv_dir=Path())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
            answers = [await http.post(f"{AT}/{what}") for what in ("suspend", "resume")]
            return [answer.status_code for answer in (*answers, await http.get(f"{AT}/kv"))]

    assert asyncio.run(run()) == [501, 501, 501]
