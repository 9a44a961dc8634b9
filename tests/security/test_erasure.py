"""After an erasure nothing of what was said is found, byte by byte, wherever this house keeps anything.

Sentences are planted by every way and into every tier, then looked for: as UTF-8, as JSON escapes it, as token ids (u32
and i64, little-endian), and K/V by the bytes of rows that only their sessions have. The same search finds all of it
before, and what another end user said after.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import inspect
import json
import os
import re
import struct
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from engines.local.kv.events import KvPublisher
from engines.local.kv.session_cache import session_tag
from engines.local.kv.storage import KVStorage
from engines.local.kv.tiers.disk import DiskTier
from engines.local.kv.tiers.host import HostTier
from engines.local.kv.tiers.remote import RemoteTier
from engines.remote.turnkeep import TurnkeepEngine
from gateway.api.state import Gateway
from gateway.sessions import places
from gateway.sessions.summariser import beside
from gateway.store.database import SqliteDatabase
from tests.faults.processes import Supervised, engine_command, free_port, serve_command, serve_environ
from tests.gateway.live import Live, live_gateway
from tests.security.engine_within import NAME, EngineWithin, engine_within, random_model, raw

pytestmark = pytest.mark.anyio

ANN, BOB = "ann@example.org", "bob@example.org"
MODEL = Path(os.environ.get("TURNKEEP_MODEL_DIR", Path.home() / ".cache/turnkeep/models/smollm2-135m-instruct"))
LEAST = 10  # bytes of what could hold something
WINDOW_IDS = 6  # ids in a row that are looked for
WAYS = ("session", "early", "keyed", "matched", "response", "tool", "conversation", "suspended", "stored", "last")


def secret(way: str, who: str) -> str:
    """Of this way and this end user alone, with what JSON escapes."""
    words = hashlib.sha256(f"{way} {who}".encode()).hexdigest()
    return f'{words[:7]}ü{words[7:14]} "{words[14:21]}" {words[21:28]}é {words[28:35]}'


def sentence(way: str, who: str) -> str:
    return f"The code of my locker is {secret(way, who)} since Monday."


def needles(way: str, who: str, tokenizer: Tokenizer) -> dict[str, list[bytes]]:
    """Form -> what to look for: the middle of the secret, as its ends depend on what stands beside it."""
    said = secret(way, who)
    halves = said[: len(said) // 2], said[len(said) // 2 :]
    ids = tokenizer.encode(said, add_special_tokens=False).ids[2:-2]
    runs = [ids[at : at + WINDOW_IDS] for at in range(len(ids) - WINDOW_IDS + 1)]
    return {
        "utf-8": [half.encode() for half in halves],
        "json": [json.dumps(half, ensure_ascii=ascii)[1:-1].encode() for half in halves for ascii in (True, False)],
        "u32": [struct.pack(f"<{WINDOW_IDS}I", *run) for run in runs],
        "i64": [struct.pack(f"<{WINDOW_IDS}q", *run) for run in runs],
        "msgpack": [b"".join(map(msgspec.msgpack.encode, run)) for run in runs],  # as KV events spell ids
    }


@dataclass
class House:
    """A gateway before our engine, and all places where either keeps anything."""

    live: Live
    engine: EngineWithin
    folder: Path
    tokenizer: Tokenizer
    log: Callable[[], bytes]
    tools: bool  # whether the model's template takes tool calls
    _logged: bytes = field(default=b"")

    @property
    def gateway(self) -> Gateway:
        found: Gateway = self.live.app.state.gateway
        return found

    def places(self) -> Iterable[tuple[str, bytes]]:
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                kind = "kv files" if path.is_relative_to(self.engine.kv_dir) else "gateway files"
                yield "database" if path.name.startswith("turnkeep.db") else kind, path.read_bytes()
        yield from self.engine.dump()
        self._logged += self.log()
        yield "log", self._logged

    def found(self, wanted: Mapping[str, Mapping[str, list[bytes]]]) -> dict[str, set[str]]:
        """Place -> the forms in which something is there. `wanted`: name -> form -> bytes."""
        hits: dict[str, set[str]] = defaultdict(set)
        patterns = {
            form: re.compile(b"|".join(re.escape(one) for forms in wanted.values() for one in forms.get(form, ())))
            for form in {form for forms in wanted.values() for form in forms}
        }
        for place, content in self.places():
            hits[place] |= {form for form, pattern in patterns.items() if pattern.pattern and pattern.search(content)}
        return {place: forms for place, forms in hits.items() if forms}

    async def ask(self, path: str, body: Mapping[str, Any], **headers: str) -> dict[str, Any]:
        answer = await self.live.client.post(path, json=body, headers=headers)
        assert answer.status_code in (200, 201), f"{path}: {answer.text}"
        told: dict[str, Any] = answer.json()
        return told

    async def say(self, session: str, text: str) -> None:
        await self.ask(f"/v1/sessions/{session}/turns", {"input": text, "max_output_tokens": 6})

    def name(self, session: str) -> tuple[str, str]:
        return self.gateway.room.session_name("default", session), self.gateway.room.cache_salt("default")

    async def engine_rests(self) -> None:
        """What came down is written, and nothing runs."""
        async with asyncio.timeout(120):
            while self.engine.core.has_work() or self.engine.core._cache.pool.used != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def house(folder: Path, model: Path, capture: pytest.CaptureFixture[str]) -> AsyncIterator[House]:
    def log() -> bytes:
        out, err = capture.readouterr()
        return (out + err).encode()

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    async with engine_within(model, folder / "kv", pages=40, host_pages=40) as engine:
        upstream = {"url": engine.url, "kind": "turnkeep", "name": "ours"}
        settings = {"upstreams": (upstream,), "tokenizers": {}, "model": NAME, "log_level": "debug"}
        async with live_gateway(folder / "gateway", embed=False, **settings) as live:
            async with asyncio.timeout(60):
                while (await live.client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield House(live, engine, folder, tokenizer, log, model != MODEL)


async def plant(house: House, who: str) -> None:
    """Everything that `who` says, but for the last word."""
    named = {"user_ref": who, "title": sentence("session", who), "metadata": {"n": who}, "policy": {"mode": "manual"}}
    made = await house.ask("/v1/sessions", named)
    long = str(made["id"])
    await house.say(long, "Good morning, I have some questions.")
    await house.say(
        long, f"{sentence('early', who)} I had a long walk by the water and thought of many other things there."
    )
    for week in range(8):
        await house.say(
            long, f"Now tell me about the tides of week {week} at the pier, in a few words if you can, please."
        )
    compacted = await house.ask(f"/v1/sessions/{long}/compact", {"strategy": "extract"})
    assert compacted["status"] == "committed", compacted
    messages = [{"role": "user", "content": sentence("keyed", who)}]
    chat = {"model": NAME, "max_tokens": 6, "user": who}
    await house.ask("/v1/chat/completions", {**chat, "messages": messages}, **{"x-session-id": f"key-{who}"})
    messages = [{"role": "user", "content": sentence("matched", who)}]
    await house.ask("/v1/chat/completions", {**chat, "messages": messages})
    await house.ask(
        "/v1/responses",
        {"model": NAME, "input": sentence("response", who), "user": who, "max_output_tokens": 16},
    )
    conversation = str((await house.ask("/v1/conversations", {}))["id"])
    if house.tools:
        asked = {"role": "user", "content": "Look it up."}
        arguments = json.dumps({"q": sentence("tool", who)}, ensure_ascii=False)
        call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c1", "output": sentence("tool", who)}
        await house.ask(f"/v1/conversations/{conversation}/items", {"items": [asked, call, output]})
    answer = {"model": NAME, "conversation": conversation, "safety_identifier": who, "max_output_tokens": 16}
    await house.ask("/v1/responses", {**answer, "input": sentence("conversation", who)})
    for way in ("suspended", "stored"):
        session = str((await house.ask("/v1/sessions", {"user_ref": who}))["id"])
        await house.say(session, sentence(way, who))
        await house.engine_rests()
        if way == "suspended":
            assert (await house.ask(f"/v1/sessions/{session}/suspend", {}))["tier"] == "disk"
        else:
            name, salt = house.name(session)
            async with httpx.AsyncClient(base_url=house.engine.url, timeout=60) as engine:
                where = f"/turnkeep/v1/sessions/{name}/suspend"
                put = await engine.post(where, params={"salt": salt, "to": "remote"})
            assert put.json()["tier"] == "remote", put.text


async def last_word(house: House, who: str) -> None:
    session = str((await house.ask("/v1/sessions", {"user_ref": who, "system": "You keep lockers."}))["id"])
    await house.say(session, sentence("last", who))


@dataclass
class Alone:
    """What only some sessions use: how much of it there is, and rows of K/V that no other text computes."""

    device: int = 0
    host: int = 0
    rows: dict[str, list[bytes]] = field(default_factory=lambda: {"device": [], "host": []})


def alone(house: House, tags: set[int], told: re.Pattern[bytes]) -> Alone:
    """`told`: ids of what was said. The last row of a block that holds some of them was computed from them."""
    engine, pool, found = house.engine, house.engine.core._cache.pool, Alone()
    values = engine.storage.values[max(engine.storage.values)]
    keys = {node.page: node.key for node in engine.core._cache.index._located.values()}
    for page in np.flatnonzero(np.isin(pool.tag, list(tags))).tolist():
        if pool.users.get(page, set()) <= tags and pool.owner[page]:
            found.device += 1
            if told.search(keys.get(page, b"")):
                found.rows["device"].append(raw(values[page, -1]))
    tiers = engine.core._tiers
    assert tiers is not None
    for piece in tiers.host.pieces():
        if piece.users <= tags:
            found.host += len(piece.names)
            if told.search(piece.token_bytes) and not piece.partial:
                found.rows["host"].append(raw(tiers.host.content(piece))[-values[0, 0].nbytes :])
    return found


async def erased(house: House) -> tuple[dict[str, Any], Mapping[str, Mapping[str, list[bytes]]], dict[str, Any]]:
    """Plant for both, see that it is found, erase Ann -> the receipt, what was planted, and what was there before."""
    await plant(house, ANN)
    await plant(house, BOB)  # pushes what is hers down, most of it to the disk
    await house.say(f"key-{ANN}", "And now?")  # that session comes up again
    for almanac in range(2):  # and goes down to host memory
        session = str((await house.ask("/v1/sessions", {"user_ref": BOB}))["id"])
        await house.say(session, " ".join(f"Page {n} of almanac {almanac} tells of tides." for n in range(28)))
    await last_word(house, ANN)
    await house.engine_rests()
    sessions = [session["id"] for session in await sessions_of(house, ANN)]
    planted = {way: needles(way, ANN, house.tokenizer) for way in WAYS}
    tags = {session_tag(each, salt) for name, salt in map(house.name, sessions) for each in (name, beside(name))}
    told = re.compile(b"|".join(re.escape(run) for forms in planted.values() for run in forms["u32"]))
    hers = alone(house, tags, told)
    assert all(hers.rows.values()), "something of hers lies on the device, and in host memory"
    for tier, rows in hers.rows.items():
        planted[f"k/v {tier}"] = {"k/v": rows}
    before = house.found(planted)
    counts = {"before": before, "alone": hers, "turns": await turns_of(house, sessions)}
    receipt = await house.ask("/v1/erasures", {"user": ANN})
    return receipt, planted, counts


async def sessions_of(house: House, who: str) -> list[dict[str, Any]]:
    page = await house.live.client.get("/v1/sessions", params={"user_ref": who, "limit": 100})
    found: list[dict[str, Any]] = page.json()["data"]
    return found


async def turns_of(house: House, sessions: list[str]) -> int:
    return sum([len(await house.live.turns(session)) for session in sessions])


async def check(folder: Path, model: Path, capture: pytest.CaptureFixture[str]) -> None:
    async with house(folder, model, capture) as home:
        receipt, planted, counts = await erased(home)
        before = counts["before"]
        assert {"utf-8", "json", "u32"} <= before["database"]
        planted_in = {"database", "device", "host", "kv files", "remote"}
        planted_in |= {"prefix index", "index of tiers", "session cache", "events"}
        assert before.keys() - {"staging"} == planted_in, "the log and other files never hold anything"
        assert home.found(planted) == {}, "what was erased is still there"
        assert (receipt["status"], receipt["sessions"]) == ("done", 8)
        assert (receipt["erased"]["sessions"], receipt["erased"]["turns"]) == (8, counts["turns"])
        assert {told["state"] for told in receipt["places"].values()} == {"answered"}
        gone = receipt["places"]["ours"]["gone"]
        assert gone["device"] == counts["alone"].device, "each page that only she used, and no other"
        assert gone["host"] == counts["alone"].host
        assert gone["disk"] > 0
        assert gone["remote"] > 0
        bobs = home.found({way: needles(way, BOB, home.tokenizer) for way in WAYS})
        assert {"database", "kv files", "index of tiers"} <= bobs.keys(), "his stays"
        home.engine.core.check()


async def test_nothing_of_an_erased_end_user_is_found_anywhere(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    await check(tmp_path, random_model(tmp_path_factory.mktemp("random"), MODEL), capfd)


@pytest.mark.prove
async def test_nothing_is_found_behind_a_real_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    await check(tmp_path, MODEL, capfd)


def without_salt(home: House, patch: pytest.MonkeyPatch) -> None:
    async def forget(engine: TurnkeepEngine, session: str, salt: str) -> dict[str, int]:
        await engine._upstream.delete(f"/turnkeep/v1/sessions/{session}", timeout_s=60)
        return {}

    patch.setattr(TurnkeepEngine, "forget", forget)


def done() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(0)
    return future


def left_out(owner: type, name: str, answer: Any = None) -> Callable[[House, pytest.MonkeyPatch], None]:
    """A step that is not done."""
    return lambda home, patch: patch.setattr(owner, name, lambda *_, **__: answer)


STEPS: dict[str, tuple[Callable[[House, pytest.MonkeyPatch], object], str]] = {  # what is left out -> where it shows
    "the log of the database is emptied": (left_out(SqliteDatabase, "_truncate_wal", True), "database"),
    "deleted rows are overwritten": (
        lambda home, patch: home.gateway.store._write(lambda c: c.exec_driver_sql("PRAGMA secure_delete = OFF")),
        "database",
    ),
    "pages are zeroed": (left_out(KVStorage, "zero"), "device"),
    "host memory forgets": (left_out(HostTier, "forget", 0), "host"),
    "files forget": (left_out(DiskTier, "forget", 0), "kv files"),
    "the remote store forgets": (lambda home, patch: patch.setattr(RemoteTier, "remove", lambda *_: done()), "remote"),
    "past events are let go": (left_out(KvPublisher, "forget_past"), "events"),
    "the engine is told the salt": (without_salt, "kv files"),
    "what compactions read is forgotten": (
        lambda home, patch: patch.setattr(places, "beside", lambda name: name),
        "index of tiers",
    ),
}


@pytest.mark.prove
@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_is_left_out_is_found_out(
    step: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave_out, shows = STEPS[step]
    async with house(tmp_path, random_model(tmp_path_factory.mktemp("random"), MODEL), capfd) as home:
        if inspect.isawaitable(waits := leave_out(home, monkeypatch)):
            await waits
        _, planted, _ = await erased(home)
        assert shows in home.found(planted)
        monkeypatch.undo()


# ---- the memory of processes


def alive(pattern: re.Pattern[bytes]) -> list[str]:
    """Texts, bytes and arrays that something refers to and that match, each by its holder."""
    found, seen = [], set()
    for holder in gc.get_objects():
        if type(holder) is re.Pattern:
            continue
        for held in gc.get_referents(holder):
            if type(held) not in (str, bytes, bytearray, array) or id(held) in seen:
                continue
            seen.add(id(held))
            content = held.encode(errors="surrogatepass") if type(held) is str else bytes(held)
            if len(content) > LEAST and pattern.search(content):
                found.append(f"{type(held).__name__} of {len(held)} in {type(holder).__name__}")
    return found


@pytest.mark.prove
async def test_nothing_that_is_referred_to_holds_any_of_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gateway and engine in one process: their caches, queues, rings and whatever a waiting task still names."""
    async with house(tmp_path, random_model(tmp_path_factory.mktemp("random"), MODEL), capfd) as home:
        _, planted, _ = await erased(home)
        runs = [
            re.escape(one) for forms in planted.values() for form in ("utf-8", "u32") for one in forms.get(form, ())
        ]
        pattern = re.compile(b"|".join(runs))
        del planted, runs
        re.purge()
        gc.collect()
        assert alive(pattern) == []


# what is not promised: what processes leave in their heaps


def memory_of(pid: int) -> Iterable[bytes]:
    """What a process may write, and has written."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in maps:
            span, rights, *_, name = [*line.split(), ""][:6] if len(line.split()) < 6 else line.split()[:6]
            if "w" not in rights or name.startswith("[v"):
                continue
            first, last = (int(end, 16) for end in span.split("-"))
            with contextlib.suppress(OSError, ValueError, OverflowError):
                memory.seek(first)
                yield memory.read(last - first)


@pytest.mark.prove
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="the memory of processes is read below /proc")
async def test_what_processes_leave_in_their_memory_is_told(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told, not bounded: a runtime does not scrub what it frees (docs/erasure.md). The search is shown to see."""
    model = random_model(tmp_path_factory.mktemp("random"), MODEL)
    ports = free_port(), free_port()
    engine_url, url = (f"http://127.0.0.1:{port}" for port in ports)
    environ = serve_environ(tmp_path / "data")
    wanted = needles("session", ANN, Tokenizer.from_file(str(model / "tokenizer.json")))
    engine = Supervised(engine_command(ports[0], model), engine_url, "/health", log=tmp_path / "engine")
    database = f"sqlite:///{tmp_path}/turnkeep.db"
    serve = serve_command(ports[1], [engine_url], database)
    gateway = Supervised(serve, url, "/readyz", log=tmp_path / "gateway", environ=lambda life: environ)
    async with engine, gateway, httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(engine.ready(), gateway.ready())

        def found() -> dict[str, dict[str, int]]:
            processes = {"gateway": [gateway.pid], "engine": [engine.pid, *engine.children()]}
            return {
                name: {
                    form: sum(part.count(one) for pid in pids for part in memory_of(pid) for one in runs)
                    for form, runs in wanted.items()
                }
                for name, pids in processes.items()
            }

        made = await client.post("/v1/sessions", json={"user_ref": ANN})
        for _ in range(3):
            body = {"input": sentence("session", ANN), "max_output_tokens": 6}
            turn = await client.post(f"/v1/sessions/{made.json()['id']}/turns", json=body)
            assert turn.json()["status"] in ("completed", "incomplete"), turn.text
        before = found()
        assert all(sum(forms.values()) for forms in before.values())
        receipt = await client.post("/v1/erasures", json={"user": ANN})
        assert receipt.json()["status"] == "done", receipt.text
        after = found()
    with capsys.disabled():
        print(f"\nin the memory of processes, before: {before}\nafter: {after}")
