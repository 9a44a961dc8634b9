"""Completions, embeddings and rerank: passed on with nothing of the client's but the fields, or answered by ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from engines.contract import Capabilities, EngineUnreachable
from engines.echo import EchoEngine
from engines.echo_tokens import encode
from gateway.api.completion_ids import by_ids
from gateway.api.stateless_schemas import CompletionBody
from gateway.fleet.replica import FAILURES_TO_OPEN, Replica
from gateway.fleet.stateless import choose_for
from tests.contracts.live import LiveServer
from tests.gateway.live import events_of, live_gateway

pytestmark = pytest.mark.anyio
STEALTH = {"cache_salt": "mine", "extra_key": "mine", "id_slot": 3, "priority": -9, "lora_path": "/etc", "rid": "x"}


class Upstream:
    """Answers the three routes for the model `m`, and keeps what it was asked, with its headers."""

    def __init__(self, owned_by: str = "vllm", pieces: int = 3, pause_s: float = 0.0) -> None:
        self.asked: list[tuple[str, dict[str, Any], Mapping[str, str]]] = []
        self.status, self.broken, self.left = 200, False, asyncio.Event()
        self.reply: dict[str, Any] = {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 4}}
        self.choices: Any = None  # in the place of a stream's own
        self.owned_by, self.pieces, self.pause_s = owned_by, pieces, pause_s
        paths = ("/v1/completions", "/v1/embeddings", "/v1/rerank")
        self.app = Starlette(
            routes=[
                *(Route(path, self.answer, methods=["POST"]) for path in paths),
                Route("/v1/models", self.models),
                Route("/version", lambda request: JSONResponse({"version": "0.20"})),
                Route("/openapi.json", self.page),
                Route("/health", lambda request: Response()),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "m", "owned_by": self.owned_by}]})

    async def page(self, request: Request) -> Response:
        return JSONResponse({"paths": {r.path: {} for r in self.app.routes}})  # type: ignore[attr-defined]

    async def answer(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if not body:  # a probe
            return JSONResponse({"error": {"message": "model: field required"}}, 400)
        self.asked.append((request.url.path, body, dict(request.headers)))
        if self.status != 200:
            return JSONResponse({"error": {"message": "no", "code": self.status}}, self.status)
        if body.get("stream"):
            return StreamingResponse(self.stream(), media_type="text/event-stream")
        return JSONResponse({"object": "list", **self.reply})

    async def stream(self) -> AsyncIterator[bytes]:
        try:
            for number in range(self.pieces):
                yield self.line(str(number), None)
                await asyncio.sleep(self.pause_s)
            if not self.broken:
                yield self.line("", "stop")
                yield b"data: [DONE]\n\n"
        finally:
            self.left.set()

    def line(self, text: str, finish: str | None) -> bytes:
        choices = self.choices or [{"index": 0, "text": text, "finish_reason": finish}]
        return b"data: " + orjson.dumps({"choices": choices, "usage": self.reply["usage"]}) + b"\n\n"


@pytest.mark.parametrize("owned_by", ["vllm", "them"])
async def test_only_the_fields_of_the_route_go_upstream(tmp_path: Path, owned_by: str) -> None:
    upstream = Upstream(owned_by)
    with LiveServer(upstream.app) as server:
        url = [{"url": server.url, "api_key": "sk-ours"}]
        async with live_gateway(tmp_path, upstreams=url, embed=False) as live:
            asks: dict[str, dict[str, Any]] = {
                "/v1/embeddings": {"input": ["a", "b"], "dimensions": 8},
                "/v1/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
                "/v1/completions": {"prompt": "a", "max_tokens": 3, "n": 2, "echo": True},
            }
            headers = {"authorization": "Bearer theirs", "cookie": "c=1", "x-forwarded-for": "9.9.9.9", "x-custom": "y"}
            for path, fields in asks.items():
                asked = {"model": "m", "user": "someone", **fields, **STEALTH}
                answer = await live.client.post(path, json=asked, headers=headers)
                assert answer.status_code == 200, answer.text
                assert answer.json()["turnkeep"]["mode"] == "forward"
            salt = live.app.state.gateway.room.cache_salt("default")
            metrics = (await live.client.get("/metrics")).text
    for path, body, sent in upstream.asked:
        assert body.pop("cache_salt", "") == (salt if owned_by == "vllm" else "")
        assert body == {"model": "m", **asks[path]}
        assert sent["authorization"] == "Bearer sk-ours"
        assert {"cookie", "x-forwarded-for", "x-custom"}.isdisjoint(sent)
        assert sent["x-request-id"].startswith("req_")
    assert 'turnkeep_forwarded_total{route="/v1/rerank",status="completed"} 1.0' in metrics
    assert 'turnkeep_forwarded_tokens_total{kind="prompt",route="/v1/embeddings"} 4.0' in metrics


async def test_a_stream_comes_as_it_is_and_says_where_from(tmp_path: Path) -> None:
    upstream = Upstream()
    with LiveServer(upstream.app) as server:
        async with live_gateway(tmp_path, upstreams=server.url, embed=False) as live:
            asked = {"model": "m", "prompt": "a", "stream": True}
            async with live.client.stream("POST", "/v1/completions", json=asked) as answer:
                told = [event async for event in events_of(answer)]
    assert [event["choices"][0]["text"] for event in told] == ["0", "1", "2", ""]
    assert told[-1]["turnkeep"]["kind"] == "vllm"


async def test_a_client_that_leaves_closes_upstream_and_a_cut_stream_ends_with_an_error_event(tmp_path: Path) -> None:
    upstream = Upstream(pieces=10_000, pause_s=0.01)
    asked = {"model": "m", "prompt": "a", "stream": True}
    with LiveServer(upstream.app) as server:
        async with live_gateway(tmp_path, upstreams=server.url, embed=False) as live:
            async with live.client.stream("POST", "/v1/completions", json=asked) as answer:
                await anext(answer.aiter_bytes())
            async with asyncio.timeout(2):
                while not upstream.left.is_set():  # noqa: ASYNC110 - it is set in another loop
                    await asyncio.sleep(0.01)
            upstream.pieces, upstream.broken = 2, True
            text = (await live.client.post("/v1/completions", json=asked)).text
            metrics = (await live.client.get("/metrics")).text
    assert '"upstream_lost"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert 'turnkeep_forwarded_total{route="/v1/completions",status="failed"} 1.0' in metrics
    assert 'turnkeep_forwarded_total{route="/v1/completions",status="cancelled"} 1.0' in metrics


async def test_another_replica_is_asked_and_refusals_are_ours(tmp_path: Path) -> None:
    one, two = Upstream(), Upstream()
    with LiveServer(one.app) as first, LiveServer(two.app) as second:
        async with live_gateway(tmp_path, upstreams=f"{first.url},{second.url}", embed=False) as live:
            asked = {"model": "m", "input": "a"}
            one.status = 500
            for _ in range(4):
                assert (await live.client.post("/v1/embeddings", json=asked)).status_code == 200
            two.status = 422
            one.status = 422
            answer = await live.client.post("/v1/embeddings", json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    assert len(two.asked) >= 4


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/v1/embeddings", {"model": "echo", "input": "a"}, 400, "route_not_served", "model"),
        ("/v1/rerank", {"model": "none", "query": "q", "documents": ["a"]}, 404, "model_not_found", "model"),
        ("/v1/completions", {"model": "echo", "prompt": ["a", "b"]}, 400, "route_not_served", "model"),
        ("/v1/completions", {"model": "echo", "prompt": ""}, 400, "invalid_value", "prompt"),
        ("/v1/completions", {"model": "echo", "prompt": "a", "max_tokens": -1}, 400, "invalid_value", "max_tokens"),
        ("/v1/completions", {"model": "echo", "prompt": [1, "a"]}, 400, "invalid_value", None),
        ("/v1/completions", {"model": "echo", "prompt": "x" * 200_000}, 400, "context_length_exceeded", "prompt"),
        ("/v1/embeddings", {"model": "echo", "input": ["a"] * 2049}, 400, "invalid_value", None),
        ("/v1/rerank", {"model": "echo", "query": "q", "documents": []}, 400, "invalid_value", "documents"),
    ],
)
async def test_what_cannot_be_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    async with live_gateway(tmp_path) as live:
        answer = await live.client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    assert param is None or error["param"] == param


PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], encode(PROMPT)])
async def test_a_replica_that_takes_only_ids_is_asked_by_ids(tmp_path: Path, prompt: Any) -> None:
    async with live_gateway(tmp_path) as live:
        asked = {"model": "echo", "prompt": prompt, "logprobs": 1, "return_token_ids": True}
        whole = (await live.client.post("/v1/completions", json=asked)).json()
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        async with live.client.stream("POST", "/v1/completions", json=asked) as answer:
            told = [event async for event in events_of(answer)]
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], whole["turnkeep"]["mode"]) == ("hello", "stop", "ids")
    assert choice["token_ids"] == [*b"hello", 258]
    assert len(choice["logprobs"]["tokens"]) == 6
    assert "".join(c["text"] for event in told for c in event["choices"]) == "hello"
    assert told[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 6
    assert told[-2]["turnkeep"]["mode"] == "ids"


async def test_ids_fail_over_before_the_first_event(tmp_path: Path) -> None:
    engines = {"a": EchoEngine(name="a", fail_first=1), "b": EchoEngine(name="b")}
    async with live_gateway(tmp_path, engines) as live:
        found = [await live.client.post("/v1/completions", json={"model": "echo", "prompt": PROMPT}) for _ in range(2)]
    assert [answer.json()["choices"][0]["text"] for answer in found] == ["hello", "hello"]
    assert found[0].json()["turnkeep"]["replica"] == "b"


def test_ids_cannot_say_everything() -> None:
    for more in ({"n": 2}, {"echo": True}, {"suffix": "x"}, {"prompt": ["a", "b"]}, {"best_of": 2}):
        asked = CompletionBody.model_validate({"model": "m", "prompt": "a", **more})
        assert by_ids(asked, "r", lambda: 0.0) is None
    assert by_ids(CompletionBody.model_validate({"model": "m", "prompt": [[1, 2]]}), "r", lambda: 0.0) is not None


def replica(name: str, routes: frozenset[str], *, in_flight: int = 0) -> Replica:
    caps = Capabilities("vllm", ("m",), takes_ids=True, routes=routes)
    return Replica(EchoEngine(name=name), "", caps, healthy=True, in_flight=in_flight)


def test_a_replica_with_the_route_comes_before_one_that_takes_ids_and_then_the_least_work() -> None:
    route = "/v1/completions"
    plain, busy, idle = (
        replica("a", frozenset()),
        replica("b", frozenset({route}), in_flight=3),
        replica("c", frozenset({route})),
    )
    everyone = [plain, busy, idle]
    assert choose_for(route, everyone, model="m", ids=True, now=0.0) is idle
    assert choose_for(route, everyone, model="m", ids=True, now=0.0, tried=["c"]) is busy
    assert choose_for(route, everyone, model="m", ids=True, now=0.0, tried=["b", "c"]) is plain
    assert choose_for(route, everyone, model="m", ids=False, now=0.0, tried=["b", "c"]) is None
    assert choose_for(route, everyone, model="other", ids=True, now=0.0) is None
    idle.failed(EngineUnreachable("gone"), 0.0, lost=True)
    assert choose_for(route, everyone, model="m", ids=True, now=0.0) is busy


async def test_nonsense_that_a_replica_answers_is_passed_on_or_refused_and_never_our_mistake(tmp_path: Path) -> None:
    upstream = Upstream()
    with LiveServer(upstream.app) as server:
        async with live_gateway(tmp_path, upstreams=server.url, embed=False) as live:
            for count in (-5, 1e300, True, "x", [], {}):
                upstream.reply = {"data": 5, "usage": {"prompt_tokens": count, "completion_tokens": count}}
                answer = await live.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
                assert answer.status_code == 200, (count, answer.text)
            upstream.reply = {"usage": -1}
            asked = {"model": "m", "prompt": "a", "stream": True}
            for choices in (5, "abc", {"a": 1}, [None], [[]]):
                upstream.choices = choices
                answer = await live.client.post("/v1/completions", json=asked)
                assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_broken"), choices
                for replica in live.app.state.gateway.fleet:
                    replica.failures = 0


async def test_a_request_that_breaks_every_replica_takes_none_from_the_others(tmp_path: Path) -> None:
    one, two = Upstream(), Upstream()
    with LiveServer(one.app) as first, LiveServer(two.app) as second:
        async with live_gateway(tmp_path, upstreams=f"{first.url},{second.url}", embed=False) as live:
            asked = {"model": "m", "input": "a"}
            one.status = two.status = 500
            for _ in range(2 * FAILURES_TO_OPEN):
                assert (await live.client.post("/v1/embeddings", json=asked)).status_code == 502
            one.status = 200
            assert {replica.state for replica in live.app.state.gateway.fleet} == {"ready"}
            for _ in range(2 * FAILURES_TO_OPEN):
                assert (await live.client.post("/v1/embeddings", json=asked)).status_code == 200
            states = {replica.url: replica.state for replica in live.app.state.gateway.fleet}
            assert states[first.url] == "ready"
