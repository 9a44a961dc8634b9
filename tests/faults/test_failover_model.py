"""Two real engines on the real model: an answer whose engine is lost after any of its tokens is the one that never was
interrupted, byte for byte.

python -m pytest -m prove tests/faults/test_failover_model.py
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.contract import Delta, EngineLost, GenerateRequest
from engines.remote.http import Upstream
from engines.remote.turnkeep import TurnkeepEngine
from tests.faults.broken_echo import Fate
from tests.faults.processes import Supervised, engine_command, free_port
from tests.gateway.live import Live, events_of, live_gateway

pytestmark = [pytest.mark.anyio, pytest.mark.model, pytest.mark.prove, pytest.mark.timeout(1800)]

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
ASKED = "Write two sentences about a keeper of a lighthouse and her dog."
MANY_BYTES = {"type": "object", "properties": {"a": {"const": "zwölf 世界 👩‍👩‍👧 żółw"}}, "required": ["a"]}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 20}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


def schema(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": fields}}}


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop strings": {"stop": [" and", "dog."]},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    "a seed": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
    "a schema": schema("person", PERSON),
    "characters of many bytes": schema("words", MANY_BYTES),
}


class Cut(TurnkeepEngine):
    """A real engine over the real wire, whose stream is lost as its fate says: its connection closes."""

    def __init__(self, upstream: Upstream, fate: Fate) -> None:
        super().__init__(upstream)
        self._fate = fate

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        doomed, sent = self._fate.times > 0, 0
        self._fate.times -= doomed
        async with aclosing(super().generate(request)) as deltas:
            async for delta in deltas:
                if doomed and sent == self._fate.ids:
                    raise EngineLost("it was to be", replica=self.name)
                yield delta
                sent += len(delta.ids)


@asynccontextmanager
async def real_pair(folder: Path, model_dir: Path, fate: Fate) -> AsyncIterator[tuple[Live, list[Supervised]]]:
    async with AsyncExitStack() as stack:
        engines, processes = {}, []
        for name in "ab":
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            command = [*engine_command(port, model_dir), "--served-name", "small"]
            engine = Supervised(command, url, "/health", log=folder / f"engine-{name}.log")
            processes.append(await stack.enter_async_context(engine))
            engines[name] = Cut(Upstream(url, name=name), fate)
        await asyncio.gather(*(process.ready() for process in processes))
        live = await stack.enter_async_context(live_gateway(folder, engines, tokenizers={}))
        yield live, processes


async def well(live: Live) -> None:
    """Both engines are in rotation: their failures were staged."""
    fleet = live.app.state.gateway.fleet
    for replica in fleet:
        replica.was_down, replica.rest_until = True, 0.0
        await fleet.probe(replica)


async def answered(live: Live, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Events of a turn in a session of its own, and the turn as it is kept, with its ids."""
    tools = body.pop("tools", [])
    session = await live.session(model="small", tools=tools)
    sent = {"input": ASKED, "stream": True, "temperature": 0, "max_output_tokens": 48, **body}
    async with live.client.stream("POST", f"/v1/sessions/{session}/turns", json=sent, timeout=300) as response:
        events = [event async for event in events_of(response)]
    assert events[-1]["type"] == "session.turn.completed", events[-1]
    (turn,) = await live.turns(session, include="token_ids")
    return events, turn


def told(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a reader has of an answer, however it was cut into pieces; without the calls' random ids."""
    kinds = ("output_text", "reasoning_text", "function_call_arguments")
    texts = {
        kind: "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta") for kind in kinds
    }
    logprobs = [p for event in events for p in event.get("logprobs", ())]
    names = [event["name"] for event in events if event.get("call_id")]
    tokens = [p["token"] for p in logprobs]
    return {**texts, "tokens": tokens, "names": names, "finish": events[-1]["turn"]["finish_reason"]}


def values(events: Sequence[dict[str, Any]]) -> list[float]:
    return [p["logprob"] for event in events for p in event.get("logprobs", ())]


def some(count: int) -> list[int]:
    """Cuts of an answer of so many ids: the first ones, the last ones, and every seventh."""
    return sorted({*range(1, min(4, count)), *range(4, count, 7), count - 2, count - 1} - {0, -1, count})


async def cut_everywhere(live: Live, fate: Fate, **body: Any) -> int:
    fate.times = 0
    events, turn = await answered(live, **body)
    ids = turn["tokens"]["output_ids"]
    for k in some(len(ids)):
        fate.ids, fate.times = k, 1
        await well(live)
        again, moved = await answered(live, **body)
        assert told(again) == told(events), f"after {k} of {len(ids)}"
        assert values(again) == pytest.approx(values(events), abs=1e-3)  # the sums of a prefill have another order
        assert moved["tokens"]["output_ids"] == ids
        assert moved["usage"]["output_tokens"] == len(ids)
        assert [move["at_tokens"] for move in moved["metadata"]["continued"]] == [k]
    return len(some(len(ids)))


async def test_any_answer_goes_on_as_if_nothing_had_been(tmp_path: Path, model_dir: Path) -> None:
    fate, cuts = Fate(times=0), 0
    async with real_pair(tmp_path, model_dir, fate) as (live, processes):
        for body in CASES.values():
            cuts += await cut_everywhere(live, fate, **body)
        uninterrupted, _ = await answered(live)
        for k in (3, 17):  # and a process that is killed in earnest
            await well(live)
            before, pieces = told(uninterrupted), 0
            session = await live.session(model="small")
            sent = {"input": ASKED, "stream": True, "temperature": 0, "max_output_tokens": 48}
            events = []
            async with live.client.stream("POST", f"/v1/sessions/{session}/turns", json=sent, timeout=300) as response:
                async for event in events_of(response):
                    events.append(event)
                    pieces += event["type"] == "response.output_text.delta"
                    if pieces == k:
                        at = events[0]["turn"]["metadata"]["replica"]
                        processes["ab".index(at)].kill()
                        pieces += 1
            assert told(events) == before
            (move,) = events[-1]["turn"]["metadata"]["continued"]
            assert (move["from"], move["reason"]) == (at, "lost")
            await asyncio.gather(*(process.ready() for process in processes))
        print(json.dumps({"cases": len(CASES), "cuts": cuts, "killed": 2, "bytes_that_differ": 0}))


async def test_tool_calls_and_reasoning_go_on_too(tmp_path: Path, model_dir: Path) -> None:
    """The small model under a template that has them: calls by its grammar, reasoning because the prompt opens it."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    template = (TEMPLATES / "qwen3.jinja").read_text()
    closed, opened = r"'<think>\n\n</think>\n\n'", r"'<think>\n'"
    assert closed in template
    template = template.replace(closed, opened)  # without thinking, says this one, the answer begins in a thought
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(template)
    fate = Fate(times=0)
    async with real_pair(tmp_path, folder, fate) as (live, _):
        cuts = await cut_everywhere(live, fate, tools=[TOOL], tool_choice="required")
        thinking: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        assert told((await answered(live, **thinking))[0])["reasoning_text"]
        cuts += await cut_everywhere(live, fate, **thinking)
        print(json.dumps({"cuts": cuts, "bytes_that_differ": 0}))
