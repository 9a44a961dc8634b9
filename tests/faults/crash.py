"""Conversations that go on while the gateway and its engine are killed, and the audit of what is left.

clients     several sessions at once; each turn has an Idempotency-Key and is sent until it is answered
killer      one gateway life for each failpoint, then kill -9 at random moments: gateway, engine front, model process
audit       each key one user turn and one answer, in order, as the client heard them; ids of the path consistent
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from gateway.sessions.tokens import ModelTokens
from tests.faults.processes import Supervised
from tests.gateway.live import events_of

TURN_S = 240.0  # a turn that is not answered within this is stuck
POINT_S = 120.0  # a failpoint that is not hit within this is on nobody's way
WORDS = ("the", "keeper", "lights", "lamp", "at", "dusk", "and", "writes", "hour", "into", "book", "beside", "stair")


@dataclass(frozen=True)
class Load:
    model: str
    turns: int  # at least; the clients go on until the killer is done
    sessions: int
    max_output_tokens: int = 96
    system: str = "Be brief."


@dataclass(frozen=True)
class Kills:
    points: tuple[str, ...] = ()  # NAME:N, one gateway life each
    gateway: int = 0
    engine_front: int = 0
    engine_model: int = 0

    @property
    def total(self) -> int:
        return len(self.points) + self.gateway + self.engine_front + self.engine_model


@dataclass
class Heard:
    """An answer as the client heard it."""

    key: str
    text: str
    turn_id: str
    answer: str


@dataclass
class Story:
    heard: dict[str, list[Heard]] = field(default_factory=dict)  # by session
    told: Counter[str] = field(default_factory=Counter)  # what tries ended in
    killed: Counter[str] = field(default_factory=Counter)

    @property
    def answered(self) -> int:
        return sum(map(len, self.heard.values()))


async def crash(
    gateway: Supervised, engine: Supervised, load: Load, kills: Kills, seed: int, tokens: ModelTokens
) -> dict[str, Any]:
    """Run it and audit it; a summary. `gateway` must be given `failpoints(kills)` as its environment."""
    dice, story, started = random.Random(seed), Story(), time.monotonic()
    await engine.ready()
    await gateway.ready()
    killer = asyncio.create_task(_kill(gateway, engine, kills, dice, story))
    clients = [
        converse(gateway.url, f"s{n}", load, story, killer, random.Random(seed + n)) for n in range(load.sessions)
    ]
    try:
        await asyncio.gather(*clients)
        await killer
    finally:
        killer.cancel()
    ran_s = time.monotonic() - started
    assert sum(story.killed.values()) >= kills.total
    await gateway.ready()
    statuses = await audit(gateway.url, load, story, tokens)
    return {
        "seed": seed,
        "model": load.model,
        "sessions": load.sessions,
        "max_output_tokens": load.max_output_tokens,
        "turns": story.answered,
        "kills": dict(story.killed),
        "kills_in_all": sum(story.killed.values()),
        "gateway_lives": gateway.lives,
        "engine_lives": engine.lives,
        "tries": sum(story.told.values()),
        "tries_ended_in": dict(story.told),
        "stored": dict(statuses),
        "lost_or_doubled": 0,  # the audit raises otherwise
        "duration_s": round(ran_s, 1),
    }


def points(names: Sequence[str], hits: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"{name}:{n}" for n in hits for name in names)


def failpoints(kills: Kills, life: int) -> dict[str, str]:
    """The variables of the gateway's n-th life."""
    return {"TURNKEEP_FAILPOINT": kills.points[life - 1]} if life <= len(kills.points) else {}


async def _kill(gateway: Supervised, engine: Supervised, kills: Kills, dice: random.Random, story: Story) -> None:
    for life, point in enumerate(kills.points, 1):
        name = point.partition(":")[0]
        if not await gateway.dead(life, within_s=POINT_S):
            raise AssertionError(f"the failpoint {point} was not reached")
        assert gateway.codes[life - 1] == -signal.SIGKILL
        story.killed[name] += 1
    marks = ["gateway"] * kills.gateway + ["engine_front"] * kills.engine_front + ["engine_model"] * kills.engine_model
    dice.shuffle(marks)
    for mark in marks:
        await engine.ready()
        await gateway.ready()
        await until_answered(story)
        await asyncio.sleep(dice.uniform(0.05, 1.0))
        victim = gateway if mark == "gateway" else engine
        life = victim.lives
        victim.send(signal.SIGKILL, victim.children()[0] if mark == "engine_model" else None)
        assert await victim.dead(life), f"{mark} did not end"
        story.killed[mark] += 1


async def until_answered(story: Story) -> None:
    """Until one more turn was answered: kills that follow each other faster than an engine loads prove nothing."""
    until, before = time.monotonic() + TURN_S, story.answered
    while story.answered == before:
        assert time.monotonic() < until, "no turn was answered after a kill"
        await asyncio.sleep(0.02)


async def converse(
    url: str, session: str, load: Load, story: Story, killer: asyncio.Task[None], dice: random.Random
) -> None:
    """One client's conversation, until the killer is done and enough was answered."""
    heard = story.heard[session] = []
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        await _until(client, "/v1/sessions", {"id": session, "model": load.model, "system": load.system}, story)
        for number in itertools.count(1):
            if killer.done() and (killer.exception() is not None or story.answered >= load.turns):
                return
            text = f"{session} message {number}: {' '.join(dice.choices(WORDS, k=dice.randint(3, 14)))}"
            body = {"input": text, "max_output_tokens": load.max_output_tokens, "temperature": 0}
            body["stream"] = dice.random() < 0.5
            turn = await _until(client, f"/v1/sessions/{session}/turns", body, story, key=f"{session}-{number}")
            heard.append(Heard(f"{session}-{number}", text, turn["id"], _text(turn)))


async def _until(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], story: Story, key: str = "make"
) -> dict[str, Any]:
    """Send the same request under the same key until it is answered, as a client's library does."""
    until, told = time.monotonic() + TURN_S, Counter[str]()
    while time.monotonic() < until:
        try:
            ending, answer = await _once(client, path, body, key)
        except httpx.TransportError as error:
            ending, answer = type(error).__name__, None
        told[ending] += 1
        story.told[ending] += 1
        if answer is not None:
            return answer
        await asyncio.sleep(0.1)
    raise AssertionError(f"{key} was not answered within {TURN_S} s: {dict(told)}, the last: {ending}")


async def _once(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], key: str
) -> tuple[str, dict[str, Any] | None]:
    """(how it ended, the answer where there is one)"""
    headers = {"idempotency-key": key}
    if not body.get("stream"):
        answer = await client.post(path, json=body, headers=headers)
        if answer.status_code in (200, 201):
            found = answer.json()
            done = found.get("status") != "incomplete"
            return ("answered" if done else "incomplete"), (found if done else None)
        return _refused(answer), None
    async with client.stream("POST", path, json=body, headers=headers) as response:
        if response.status_code != 200:
            await response.aread()
            return _refused(response), None
        text, count = "", 0
        async for event in events_of(response):
            if event["type"] == "error":  # the stream breaks off, the turn may run on
                return f"error: {event['error']['code']}", None
            count += 1
            assert event["sequence_number"] == count, "an event is missing, or came twice"
            text += event.get("delta", "")
            if event["type"] == "session.turn.completed":
                assert _text(event["turn"]) == text, "the stream's text is not the answer's"
                return "streamed", event["turn"]
            if event["type"] in ("session.turn.failed", "session.turn.incomplete"):
                return f"{event['type']}: {event['turn']['error']['code']}", None
        raise AssertionError("a stream ended without a terminal event")


def _refused(answer: httpx.Response) -> str:
    """What a client may be told while processes die: to try again."""
    assert answer.status_code in (409, 502, 503, 504), answer.text
    lost = answer.json()["error"]["code"] == "lease_lost"
    assert not (answer.status_code == 503 or lost) or int(answer.headers["retry-after"]) >= 1, answer.text
    return f"{answer.status_code} {answer.json()['error']['code']}"


def _text(turn: dict[str, Any]) -> str:
    return "".join(
        part if isinstance(part, str) else part["text"]
        for item in turn["output"]
        for part in ([item["content"]] if isinstance(item["content"], str) else item["content"])
    )


async def audit(url: str, load: Load, story: Story, tokens: ModelTokens) -> Counter[str]:
    """Raises AssertionError; how many turns are stored in which status."""
    statuses: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for session, heard in story.heard.items():
            after = await _until(
                client, f"/v1/sessions/{session}/turns", {"input": "the end", "max_output_tokens": 8}, Story(), "end"
            )
            path = await _turns(client, session, branch="head", include="token_ids")
            assert path.pop()["id"] == after["id"]
            assert [turn["input"] for turn in path] == [
                [{"type": "message", "role": "user", "content": one.text}] for one in heard
            ], "a user turn is missing, or there twice, or out of order"
            assert [turn["id"] for turn in path] == [one.turn_id for one in heard]
            assert [_text(turn) for turn in path] == [one.answer for one in heard]
            assert {turn["status"] for turn in path} == {"completed"}
            assert [len(turn["output"]) for turn in path] == [1] * len(heard), "an answer is there twice"
            _audit_ids(path, load, tokens)
            everything = await _turns(client, session)
            assert [turn["seq"] for turn in everything] == list(range(1, len(everything) + 1))
            statuses.update(turn["status"] for turn in everything)
            state = (await client.get(f"/v1/sessions/{session}")).json()
            assert (state["status"], state["head_turn_id"]) == ("idle", after["id"])
    assert set(statuses) <= {"completed", "incomplete", "failed"}
    return statuses


async def _turns(client: httpx.AsyncClient, session: str, **query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        after = found[-1]["seq"] if found else 0
        page = await client.get(f"/v1/sessions/{session}/turns", params={"limit": 100, "after": after, **query})
        assert page.status_code == 200, page.text
        found += page.json()["data"]
        if not page.json()["has_more"]:
            return found


def _audit_ids(path: Sequence[dict[str, Any]], load: Load, tokens: ModelTokens) -> None:
    """The ids of each turn go on where its parent's end, and read as the whole conversation rendered anew."""
    ids: list[int] = []
    messages: list[dict[str, Any]] = [{"role": "system", "content": load.system}]
    parent = None
    for turn in path:
        kept = turn["tokens"]
        assert turn["parent_id"] == parent
        assert kept["base_tokens"] <= len(ids)
        ids = ids[: kept["base_tokens"]] + kept["prompt_ids"] + kept["output_ids"]
        assert len(ids) == kept["path_tokens"]
        messages += [{"role": "user", "content": turn["input"][0]["content"]}]
        messages += [{"role": "assistant", "content": _text(turn)}]
        parent = turn["id"]
    whole = tokens.render([*messages, {"role": "user", "content": "and now?"}])
    anew = list(struct.unpack(f"<{len(whole) // 4}I", whole))
    assert tokens.decode(anew).startswith(tokens.decode(ids)), "the path is not the conversation"
    if load.model == "echo":  # a model may write a text in other ids than its tokenizer would
        assert anew[: len(ids)] == ids
