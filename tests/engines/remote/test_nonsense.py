"""Servers whose answers hold nonsense in one place: an EngineError at most, and no number that is none."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any

import orjson
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engines.contract import Capabilities, ChatPrompt, Delta, Engine, EngineError, EngineLoad, GenerateRequest, Sampling
from engines.echo import EchoEngine
from engines.remote.http import Upstream
from engines.remote.llamacpp import LlamaCppEngine
from engines.remote.openai import OpenAiEngine
from engines.remote.sglang import SglangEngine
from engines.remote.turnkeep import TurnkeepEngine
from engines.remote.vllm import VllmEngine
from tests.contracts import llamacpp_app, openai_app, sglang_app, vllm_app, wire_app
from tests.contracts.live import LiveServer
from tests.contracts.subjects import QUICK, chatml, ids_prompt

pytestmark = pytest.mark.anyio

NONSENSE = (None, True, -1, 0, 1e300, 1 << 62, 0.5, "", "²", "x" * 5000, [], [[]], {}, {"a": []})
KINDS: dict[str, tuple[Callable[[EchoEngine], ASGIApp], Callable[[Upstream], Engine], bool]] = {
    "turnkeep": (wire_app.create_app, TurnkeepEngine, True),
    "vllm": (vllm_app.create_app, VllmEngine, True),
    "sglang": (sglang_app.create_app, SglangEngine, True),
    "llamacpp": (llamacpp_app.create_app, LlamaCppEngine, True),
    "openai": (openai_app.create_app, OpenAiEngine, False),
}
PARTS = 12  # a run of `make test` tries so many places


@dataclass
class Spoiler:
    """ASGI middleware: puts `value` in the place `at` of all that a server's answers hold, counted in their order."""

    app: ASGIApp
    at: int = -1
    value: Any = None
    seen: int = 0  # places so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def spoiled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(k, v) for k, v in message["headers"] if k.lower() != b"content-length"]
                message = {**message, "headers": headers}
            elif message.get("body"):
                message = {**message, "body": self.spoil(message["body"])}
            await send(message)

        await self.app(scope, receive, spoiled)

    def spoil(self, body: bytes) -> bytes:
        if body.startswith(b"data: "):
            return b"\n\n".join(self.event(event) for event in body.split(b"\n\n"))
        try:
            return orjson.dumps(self.within(orjson.loads(body)))
        except orjson.JSONDecodeError:
            return b"\n".join(self.line(line) for line in body.split(b"\n"))

    def event(self, event: bytes) -> bytes:
        told = event.removeprefix(b"data: ")
        return b"data: " + orjson.dumps(self.within(orjson.loads(told))) if told.startswith(b"{") else event

    def line(self, line: bytes) -> bytes:
        """A sample of Prometheus' text."""
        name, blank, _ = line.rpartition(b" ")
        return name + blank + (b"NaN", b"-Inf", b"+Inf", b"x")[self.at % 4] if name and self.hit() else line

    def within(self, told: Any) -> Any:
        if self.hit():
            return self.value
        if isinstance(told, dict):
            return {key: self.within(value) for key, value in told.items()}
        if isinstance(told, list):
            return [self.within(value) for value in told]
        return told

    def hit(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self.at


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 1 << 53


def check(caps: Capabilities, load: EngineLoad) -> None:
    for number in (caps.window, caps.block_size):
        assert number is None or (is_count(number) and number > 0), caps
    assert all(type(name) is str for name in (*caps.models, *caps.adapters, *caps.routes, *caps.unseen)), caps
    assert caps.epoch is None or type(caps.epoch) is str
    assert caps.max_running is None or is_count(caps.max_running)
    for number in (load.running, load.waiting, load.kv_blocks_total or 0, load.kv_blocks_used or 0):
        assert is_count(number), load
    assert load.kv_used_ratio is None or (type(load.kv_used_ratio) is float and math.isfinite(load.kv_used_ratio))
    orjson.dumps([load, {field.name: getattr(caps, field.name) for field in fields(caps)}], default=list)


def check_answer(deltas: list[Delta]) -> None:
    for delta in deltas:
        assert type(delta.text) is str
        assert type(delta.reasoning) is str
        assert all(type(token) is int and 0 <= token < 1 << 32 for token in delta.ids), delta
        assert delta.stop is None or type(delta.stop) is str
        if (usage := delta.usage) is not None:
            assert is_count(usage.prompt_tokens), usage
            assert is_count(usage.output_tokens), usage
            assert usage.cached_tokens is None or 0 <= usage.cached_tokens <= usage.prompt_tokens, usage


async def all_of(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    async with aclosing(deltas):
        return [delta async for delta in deltas]


def places(count: int, some: int | None) -> Iterator[tuple[int, Any]]:
    every = [(at, value) for at in range(count) for value in NONSENSE]
    yield from every if some is None else random.Random(4).sample(every, some)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("some", [PARTS, pytest.param(None, marks=pytest.mark.prove)])
async def test_nonsense_in_one_place_is_an_engine_error_at_most(kind: str, some: int | None) -> None:
    app, adapter, ids = KINDS[kind]
    spoiler = Spoiler(app(EchoEngine()))
    prompt = ids_prompt(chatml("hi")) if ids else ChatPrompt([{"role": "user", "content": "hi"}])
    asked = GenerateRequest("r", "echo", prompt, Sampling(8))

    async def talked(upstream: Upstream) -> None:
        engine = adapter(upstream)
        try:
            check(await engine.capabilities(), await engine.load())
            await engine.tokenize("a", model="echo")
            check_answer(await all_of(engine.generate(asked)))
        finally:
            await engine.aclose()

    with LiveServer(spoiler) as server:
        await talked(Upstream(server.url, name="r", timeouts=QUICK))
        for at, value in places(spoiler.seen, some):
            spoiler.at, spoiler.value, spoiler.seen = at, value, 0
            try:
                await talked(Upstream(server.url, name="r", timeouts=QUICK))
            except EngineError:
                continue
            except Exception as error:
                raise AssertionError(f"place {at}: {value!r}") from error
