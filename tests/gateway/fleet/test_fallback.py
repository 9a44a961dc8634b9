"""A fallback: an upstream that takes a turn by chat, under a name of its own, and only where no other replica can."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.contract import (
    Capabilities,
    ChatPrompt,
    EngineBroken,
    EngineUnreachable,
    GenerateRequest,
    Sampling,
    Unsupported,
)
from engines.echo import EchoEngine
from engines.remote.stand_in import StandIn
from gateway.fleet.eligible import eligible
from gateway.fleet.outlook import Outlook
from gateway.fleet.outlook import Path as PromptPath
from gateway.fleet.placement import Pin, choose
from gateway.fleet.replica import Replica
from gateway.settings import Settings
from gateway.upstream import UpstreamAddress
from tests.contracts import openai_app, vllm_app
from tests.contracts.live import Canned, FaultLayer, LiveServer
from tests.contracts.subjects import ids_prompt
from tests.gateway.live import live_gateway

pytestmark = pytest.mark.anyio


def replica(name: str, **more: Any) -> Replica:
    return Replica(EchoEngine(name=name), "", Capabilities("openai", ("m",), takes_chat=True), healthy=True, **more)


def test_a_fallback_is_eligible_only_where_no_other_can_take_the_turn() -> None:
    one, two, last = replica("one"), replica("two"), replica("last", fallback=True)
    everyone = [last, one, two]
    assert eligible(everyone, model="m", now=0.0) == [one, two]
    assert eligible(everyone, model="m", now=0.0, tried=["one"]) == [two]
    two.failed(EngineUnreachable("gone"), 0.0, lost=True)
    assert eligible(everyone, model="m", now=0.0, tried=["one"]) == [last]
    assert eligible(everyone, model="m", now=0.0, tried=["one", "last"]) == []
    assert eligible(everyone, model="none", now=0.0) == []


def test_a_session_that_a_fallback_answered_leaves_it_when_another_can_answer() -> None:
    one, last = replica("one"), replica("last", fallback=True)
    pin = Pin("last", None)
    placed = choose([one, last], model="m", pin=pin, path=PromptPath(9, 9), outlook=Outlook(), now=0.0, at=0.0)
    assert placed is not None
    assert (placed.replica.name, placed.as_json().get("fallback")) == ("one", None)
    alone = choose([last], model="m", pin=None, path=PromptPath(9, 9), outlook=Outlook(), now=0.0, at=0.0)
    assert alone is not None
    assert (alone.reason, alone.as_json()["fallback"], alone.as_json()["kind"]) == ("fallback", True, "openai")


async def test_a_stand_in_is_asked_by_messages_for_the_model_that_it_has() -> None:
    engine = StandIn(EchoEngine(model="theirs"), {"ours": "theirs"})
    found = await engine.capabilities()
    assert (found.models, found.takes_ids, found.takes_chat, found.routes) == (("ours",), False, True, frozenset())
    asked = GenerateRequest("r", "ours", ChatPrompt([{"role": "user", "content": "hello"}]), Sampling(32))
    assert "".join([delta.text async for delta in engine.generate(asked)]) == "hello"
    with pytest.raises(Unsupported):
        await anext(engine.generate(GenerateRequest("r", "ours", ids_prompt("x"), Sampling(1))))
    assert await engine.tokenize("x", model="ours") is None


class IdsOnly(EchoEngine):
    async def capabilities(self) -> Capabilities:
        return replace(await super().capabilities(), kind="turnkeep", takes_chat=False)


async def test_an_engine_that_takes_no_messages_is_no_fallback_and_says_why() -> None:
    with pytest.raises(EngineBroken, match=r"own takes token ids only \(kind turnkeep\)"):
        await StandIn(IdsOnly(name="own"), {}).capabilities()


def test_a_fallback_alone_leaves_the_embedded_engine_in_its_place() -> None:
    last = {"url": "http://a:1", "fallback": True, "models": {"ours": "theirs"}}
    assert Settings(auth=False, upstreams=[last]).embedded  # type: ignore[arg-type]
    assert not Settings(auth=False, upstreams=[last, {"url": "http://b:1"}]).embedded  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="fallback = true"):
        UpstreamAddress(url="http://a:1", models={"ours": "theirs"})


async def test_a_turn_ends_at_the_fallback_and_the_next_ones_come_back(tmp_path: Path) -> None:
    ordinary = FaultLayer(vllm_app.create_app(EchoEngine()), (vllm_app.COMPLETIONS, vllm_app.CHAT))
    with LiveServer(ordinary) as first, LiveServer(openai_app.create_app(EchoEngine())) as second:
        upstreams = [
            {"url": first.url, "name": "gpu"},
            {"url": second.url, "name": "hosted", "fallback": True, "models": {"echo": "echo"}},
        ]
        async with live_gateway(tmp_path, upstreams=upstreams, embed=False) as live:
            fleet = live.app.state.gateway.fleet
            gpu = fleet.get("gpu")
            sid = await live.session(model="echo")

            async def turn(text: str) -> dict[str, Any]:
                told: dict[str, Any] = (await live.turn(sid, text)).json()
                assert told["status"] == "completed", told
                assert told["output"][0]["content"][0]["text"] == text
                return told

            said = [await turn("one")]
            ordinary.canned = Canned(502, chunks=(b"{}",))
            said += [await turn("two"), await turn("three")]  # it fails in the turn, then rests
            chat = (await live.chat([{"role": "user", "content": "four"}])).json()
            ordinary.canned = None
            shown = (await live.client.get("/admin/v1/replicas/hosted")).json()
            async with asyncio.timeout(6):
                while not gpu.available(fleet.now()):  # noqa: ASYNC110 - its probes bring it back
                    await asyncio.sleep(0.05)
            said.append(await turn("five"))
            models = [model["id"] for model in (await live.client.get("/v1/models")).json()["data"]]
    assert [told["metadata"]["mode"] for told in said] == ["ids", "chat", "chat", "ids"]
    assert [told["placement"]["replica"] for told in said] == ["gpu", "hosted", "hosted", "gpu"]
    assert [told["placement"].get("fallback", False) for told in said] == [False, True, True, False]
    assert (chat["turnkeep"]["fallback"], chat["turnkeep"]["kind"], chat["turnkeep"]["replica"]) == (
        True,
        "openai",
        "hosted",
    )
    assert (shown["fallback"], shown["capabilities"]["takes_ids"], shown["models"]) == (True, False, ["echo"])
    assert "window" in shown["unseen"]
    assert models == ["echo"]
