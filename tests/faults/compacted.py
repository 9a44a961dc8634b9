"""Conversations that are compacted while something breaks, and the one audit of what is left of them.

async with place(folder, url, gateways=2) as here:       processes: gateways, the engine `echo`, the engine `scribe`
    here.engine_told.say(summary={"delta_s": 0.1})
    talk = await Talk.begin(here.clients[0])
    await talk.until_compacting(here.engine_told)
    await talk.turn("while you work")
    rows = await talk.audit()                             raises AssertionError
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from compression.budget import Policy
from compression.segments import HEADING
from tests.faults.crash import Heard
from tests.faults.processes import Supervised, free_port, serve_command, serve_environ, told_command
from tests.gateway.talks import ANSWER, WINDOW, words

SYSTEM = "Be brief."
POLICY = {"max_output_tokens": 128, "tokens_per_turn": 100}
SLOW = {"delta_s": 0.06}  # a summary takes about two seconds
TRIGGER = Policy().trigger_ratio  # of the window
SETTLED_S = 60.0
AUDITS = 3
OVER = {"committed", "failed", "skipped", "reverted"}


class Told:
    """What an engine process is told to do at its next requests, and what it has seen."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.say()

    def say(self, **kinds: Mapping[str, Any]) -> None:
        """By kind: summary, prefill, turn. Kinds that are not named do as usual; a summary says what `noted` does."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(kinds))
        new.replace(self.file)  # an engine never reads half of it

    def seen(self, line: str) -> int:
        """How often."""
        seen = self.file.with_name(f"{self.file.name}.seen")
        return seen.read_text().splitlines().count(line) if seen.exists() else 0

    def last(self, line: str) -> int:
        """Where it stands among all lines for the last time; -1: nowhere."""
        seen = self.file.with_name(f"{self.file.name}.seen").read_text().splitlines()
        return max((at for at, one in enumerate(seen) if one == line), default=-1)

    async def until(self, line: str, count: int = 1, within_s: float = 30.0) -> None:
        until = time.monotonic() + within_s
        while self.seen(line) < count:
            assert time.monotonic() < until, f"the engine did not see {line!r} {count} times within {within_s:g} s"
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Place:
    gateways: list[Supervised]
    clients: list[httpx.AsyncClient]  # one for each gateway
    engine: Supervised
    scribe: Supervised  # another replica, with the model `scribe`
    engine_told: Told
    scribe_told: Told

    async def ready(self) -> None:
        await asyncio.gather(*(one.ready() for one in (self.engine, self.scribe, *self.gateways)))
        for client in self.clients:
            await _reached(client)

    def calm(self) -> None:
        """The engines do as usual."""
        self.engine_told.say()
        self.scribe_told.say()


async def _reached(client: httpx.AsyncClient) -> None:
    """The gateway has reached both engines, and has their tokenizers: it is ready with less."""
    until = time.monotonic() + SETTLED_S
    while True:
        replicas = (await client.get("/admin/v1/snapshot")).json()["replicas"]
        if len([one for one in replicas if one["healthy"] and one["by_ids"]]) == 2:
            return
        assert time.monotonic() < until, f"the gateway does not reach its engines: {replicas}"
        await asyncio.sleep(0.1)


@asynccontextmanager
async def place(
    folder: Path,
    url: str,
    *,
    gateways: int = 1,
    environ: Callable[[int], Mapping[str, str]] = lambda life: {},
    **settings: Any,
) -> AsyncIterator[Place]:
    """`environ` adds to the gateways' variables by their life, counted from 1."""
    told = [Told(folder / name) for name in ("echo.told", "scribe.told")]
    given = {"lease_s": 4, "lease_renew_s": 0.8, "grace_s": 3, **settings}
    base = serve_environ(folder / "data", **given)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engines = []
        for one, model in zip(told, ("echo", "scribe"), strict=True):
            port = free_port()
            command = told_command(port, one.file, model)
            engines.append(
                await enter(Supervised(command, f"http://127.0.0.1:{port}", "/health", log=folder / f"{model}.log"))
            )
        serving = []
        for number in range(gateways):
            port = free_port()
            command = serve_command(port, [engine.url for engine in engines], url)
            log = folder / f"gateway-{number}.log"
            serving.append(
                await enter(
                    Supervised(
                        command,
                        f"http://127.0.0.1:{port}",
                        "/readyz",
                        log=log,
                        environ=lambda life: {**base, **environ(life)},
                    )
                )
            )
        clients = [
            await enter(httpx.AsyncClient(base_url=one.url, timeout=SETTLED_S, trust_env=False)) for one in serving
        ]
        here = Place(serving, clients, engines[0], engines[1], told[0], told[1])
        await here.ready()
        yield here


@dataclass
class Talk:
    """A session as its client knows it: `heard` is the path, answer by answer."""

    client: httpx.AsyncClient
    id: str
    heard: list[Heard] = field(default_factory=list)
    sent: int = 0

    @classmethod
    async def begin(cls, client: httpx.AsyncClient, system: str = SYSTEM, **policy: Any) -> Talk:
        body = {"model": "echo", "system": system, "policy": {**POLICY, **policy}}
        answer = await client.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return cls(client, str(answer.json()["id"]))

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.id}"

    async def post(self, text: str, **more: Any) -> httpx.Response:
        self.sent += 1
        return await self.client.post(
            f"{self.path}/turns",
            json={"input": text, "max_output_tokens": 128, **more},
            headers={"idempotency-key": f"{self.id}-{self.sent}"},
        )

    async def turn(self, text: str | None = None, **more: Any) -> dict[str, Any]:
        """An acknowledged turn: it must still be there at the audit, in its place."""
        text = text or words(self.sent + 1)
        answer = await self.post(text, **more)
        assert answer.status_code == 200, answer.text
        turn: dict[str, Any] = answer.json()
        assert turn["status"] == "completed", turn
        self.hear(text, turn)
        return turn

    def hear(self, text: str, turn: dict[str, Any]) -> None:
        self.heard.append(Heard("", text, turn["id"], text_of(turn["output"])))

    async def fill(self, turns: int) -> None:
        for _ in range(turns):
            await self.turn()

    async def until_compacting(self, told: Told, line: str = "summary begins") -> None:
        """Turns, until the engine sees that line once more; it comes when the trigger is passed.

        Past the trigger no other turn is sent while it may still come, however slow the machine is."""
        before = told.seen(line)
        for _ in range(20):
            usage = (await self.turn())["usage"]
            used = (usage["prompt_tokens"] + usage["output_tokens"] + POLICY["max_output_tokens"]) / WINDOW
            until = time.monotonic() + (20 if used > TRIGGER else 1.5 if used > TRIGGER - 0.1 else 0)
            while time.monotonic() < until:
                if told.seen(line) > before:
                    return
                await asyncio.sleep(0.02)
        raise AssertionError(f"{len(self.heard)} turns, and no compaction: {[r['status'] for r in await self.rows()]}")

    async def rows(self) -> list[dict[str, Any]]:
        """Of its compactions, all of them, newest first."""
        return await self._all("compactions", "before", "number")

    async def _all(self, what: str, cursor: str, key: str, **query: str) -> list[dict[str, Any]]:
        """Every page of a list that goes on past the last one's `key`."""
        found: list[dict[str, Any]] = []
        while True:
            at = {cursor: found[-1][key]} if found else {}
            answer = await self.client.get(f"{self.path}/{what}", params={"limit": 100, **query, **at})
            assert answer.status_code == 200, answer.text
            page = answer.json()["data"]
            found += page
            if len(page) < 100:
                return found

    async def settled(self) -> list[dict[str, Any]]:
        until = time.monotonic() + SETTLED_S
        while True:
            rows = await self.rows()
            if all(row["status"] != "running" for row in rows):
                return rows
            assert time.monotonic() < until, f"a compaction does not end: {rows[0]}"
            await asyncio.sleep(0.05)

    async def until_committed(self) -> None:
        """Turns, until a compaction goes through; the next one that is begun must."""
        for _ in range(10):
            rows = await self.settled()
            if rows and rows[0]["status"] == "committed":
                return
            await self.turn()
            await asyncio.sleep(0.3)
        raise AssertionError(f"no compaction goes through: {rows[0]}")

    async def patch(self, **fields: Any) -> None:
        answer = await self.client.patch(self.path, json=fields, headers={"if-match": "*"})
        assert answer.status_code == 200, answer.text

    async def compact(self, **body: Any) -> dict[str, Any]:
        answer = await self.client.post(f"{self.path}/compact", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def context(self, draft: str = "") -> dict[str, Any]:
        answer = await self.client.get(f"{self.path}/context", params={"draft": draft})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def turns(self, **query: str) -> list[dict[str, Any]]:
        return await self._all("turns", "after", "seq", **query)

    async def audit(self) -> list[dict[str, Any]]:
        """Everything that must hold once no compaction runs, and that the session goes on; its compactions."""
        for _ in range(AUDITS):
            rows = await self.settled()
            if await self._audited(rows):
                return rows
        raise AssertionError(f"a compaction was committed in the midst of {AUDITS} audits")

    async def _audited(self, rows: list[dict[str, Any]]) -> bool:
        """False: the view changed between what was shown and what was sent."""
        check_rows(rows)
        check_turns(await self.turns(), await self.turns(branch="head"), self.heard)
        draft = f"and now, after {len(self.heard)} turns?"
        standing, shown = await self.context(), await self.context(draft)
        check_shown(shown, await self.turns(branch="head"), await self._session(), draft)
        if standing["compaction_id"] != shown["compaction_id"]:
            return False
        new = shown["prompt_tokens"] - standing["prompt_tokens"]
        assert len(draft) <= new <= len(draft) + 64, f"the context has {standing['prompt_tokens']} tokens, {new} fewer"
        turn = await self.turn(draft)
        assert text_of(turn["output"]) == draft[:ANSWER]
        if turn["usage"]["prompt_tokens"] == shown["prompt_tokens"]:
            return True
        assert (await self.context())["compaction_id"] != shown["compaction_id"], "the context shows what was not sent"
        return False

    async def _session(self) -> dict[str, Any]:
        return dict((await self.client.get(self.path)).json())


def text_of(items: list[dict[str, Any]]) -> str:
    parts = [item["content"] for item in items if item["type"] == "message"]
    return "".join(part if isinstance(part, str) else "".join(p["text"] for p in part) for part in parts)


def check_rows(rows: list[dict[str, Any]]) -> None:
    """`compactions` tells what happened: each run has ended, with its reason where nothing came of it."""
    assert [row["number"] for row in rows] == list(range(len(rows), 0, -1))
    made = {row["id"]: row for row in rows}
    for row in rows:
        assert row["status"] in OVER, row
        assert row["completed_at"] >= row["created_at"] - 1e-3
        assert (row["error"] is not None) == (row["status"] == "failed"), row
        if row["status"] == "failed":
            assert row["error"]["code"], row
            assert row["error"]["message"], row
        if row["status"] in ("committed", "reverted"):
            report = row["report"]
            assert report["tokens_after"] < report["tokens_before"], row
            assert row["segments"] or row["elisions"], row
            assert row["anchor_turn_id"], row
            assert row["base_id"] is None or made[row["base_id"]]["status"] in ("committed", "reverted")
        else:
            assert row["segments"] == row["elisions"] == [], "half a view was stored"


def check_turns(everything: list[dict[str, Any]], path: list[dict[str, Any]], heard: list[Heard]) -> None:
    """Every acknowledged turn once, in order, with its own answer."""
    assert [turn["seq"] for turn in everything] == list(range(1, len(everything) + 1))
    assert [(turn["id"], text_of(turn["input"]), text_of(turn["output"])) for turn in path] == [
        (one.turn_id, one.text, one.answer) for one in heard
    ]
    assert {turn["status"] for turn in path} <= {"completed"}
    parents = [None, *(turn["id"] for turn in path)]
    assert [turn["parent_id"] for turn in path] == parents[:-1]


def check_shown(context: dict[str, Any], path: list[dict[str, Any]], session: dict[str, Any], draft: str) -> None:
    """What is sent is a valid conversation; each turn stands in it once, whole or in one segment."""
    messages = context["messages"]
    assert [m["content"] for m in messages if m["role"] == "system"] == [session["system"]]
    assert messages[-1] == {"role": "user", "content": draft}
    roles = [m["role"] for m in messages if m["role"] in ("user", "assistant") and m.get("content")]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"], f"roles do not alternate: {roles}"
    check_calls(messages)
    covered = [seq for segment in context["segments"] for seq in segment["turns"]]
    assert len(covered) == len(set(covered)), "a turn stands in two segments"
    cut = {elision["turn"] for elision in context["elisions"]}
    assert set(covered) <= {turn["seq"] for turn in path}, "a segment is of another path"
    stand = [turn for turn in path if turn["seq"] not in covered]
    keep_last = session["policy"].get("keep_last", Policy().keep_last)
    kept = [*path[:1], *path[-keep_last:], *(turn for turn in path if turn["pinned"])]
    assert {turn["seq"] for turn in kept} <= {turn["seq"] for turn in stand}, "a turn that must stay was replaced"
    texts = [m["content"] for m in messages[:-1] if m["role"] == "user" and not m["content"].startswith(HEADING)]
    for text, turn in zip(texts, stand, strict=True):
        assert turn["seq"] in cut or text == text_of(turn["input"])


def check_calls(messages: list[dict[str, Any]]) -> None:
    """No tool output without its call before it, no call without its output after it."""
    called: set[str] = set()
    answered: set[str] = set()
    for message in messages:
        called |= {call["id"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool":
            assert message["tool_call_id"] in called, "a tool output without its call"
            answered.add(message["tool_call_id"])
    assert called == answered, "a call without its output"
