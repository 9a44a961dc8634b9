"""What only SGLang's adapter does: whole answers in every event, refusals inside a 200, its own fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engines.contract import (
    Delta,
    EngineLoad,
    EngineLost,
    EngineOverloaded,
    GenerateRequest,
    Grammar,
    IdsPrompt,
    RequestRefused,
    Sampling,
    Unsupported,
)
from engines.echo_tokens import pack
from engines.remote.http import Upstream
from engines.remote.sglang import SglangEngine, read_loads
from engines.remote.sglang_events import GenerateReader
from tests.contracts.live import LiveServer

pytestmark = pytest.mark.anyio
DONE = b"data: [DONE]\n\n"


def event(text: str, ids: list[int], count: int, finish: Any = None, **meta: Any) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {"id": "x", "finish_reason": finish, "prompt_tokens": 5, "completion_tokens": count, **meta},
    }


def read(events: list[dict[str, Any]], *stops: str) -> list[Delta]:
    reader = GenerateReader(stops)
    return [delta for each in events if (delta := reader.read(each)) is not None]


STOPPED = {"type": "stop", "matched": 2}
WHOLE = [event("a", [1], 1), event("ab", [1, 7], 2), event("ab", [1, 7, 2], 3, STOPPED, cached_tokens=4)]
STEPS = [event("a", [1], 1), event("b", [7], 2), event("", [2], 3, STOPPED, cached_tokens=4)]
IDS_IN_STEPS = [
    event("a", [1], 1),
    event("ab", [7], 2),
    event("ab", [2], 3, STOPPED, cached_tokens=4),
]  # --stream-output


@pytest.mark.parametrize("events", [WHOLE, STEPS, IDS_IN_STEPS], ids=["whole", "steps", "ids in steps"])
def test_the_answer_is_read_the_same_however_it_is_told(events: list[dict[str, Any]]) -> None:
    deltas = read(events)
    assert [(delta.text, delta.ids) for delta in deltas] == [("a", (1,)), ("b", (7,)), ("", (2,))]
    assert deltas[-1].finish == "stop"
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.output_tokens, deltas[-1].usage.cached_tokens) == (5, 3, 4)


def test_a_step_that_says_the_same_again_is_no_repetition_of_the_whole() -> None:
    reader = GenerateReader(text_in_steps=True)
    steps = [event("ha", [1], 1), event("ha", [1], 2), event("", [2], 3, STOPPED)]
    assert "".join(delta.text for step in steps if (delta := reader.read(step))) == "haha"


@pytest.mark.parametrize(
    "events",
    [
        [event("one tw", [1, 2], 2), event("one ", [1, 2, 3], 3, {"type": "stop", "matched": "two"})],
        [event("one tw", [1, 2], 2), event("", [3], 3, {"type": "stop", "matched": "two"})],
    ],
    ids=["whole", "steps"],
)
def test_the_first_letters_of_a_stop_string_are_never_told(events: list[dict[str, Any]]) -> None:
    deltas = read(events, "two", "xx")
    assert "".join(delta.text for delta in deltas) == "one "
    assert deltas[-1].stop == "two"


def test_letters_that_only_looked_like_a_stop_string_are_told_at_the_end() -> None:
    deltas = read([event("one tw", [1, 2], 2), event("one tw", [1, 2, 9], 3, STOPPED)], "two")
    assert "".join(delta.text for delta in deltas) == "one tw"


@pytest.mark.parametrize(
    "events",
    [
        [event("a", [1], 1), event("ab", [1, 2, 3, 4], 3)],
        [event("ab", [1], 1), event("xy", [1, 2], 2)],
        [event("a", [1], 1, {"type": "so"})],
        [{"text": "a"}],
    ],
)
def test_what_contradicts_itself_is_no_protocol(events: list[dict[str, Any]]) -> None:
    with pytest.raises((ValueError, KeyError)):
        read(events)


class Server:
    """Answers /generate with `lines`; keeps what it was asked."""

    def __init__(self, *lines: dict[str, Any], status: int = 200, **info: Any) -> None:
        self.asked: list[dict[str, Any]] = []

        async def generate(request: Request) -> Response:
            self.asked.append(orjson.loads(await request.body()))
            if status != 200:
                return JSONResponse(lines[0], status)
            body = b"".join(b"data: " + orjson.dumps(line) + b"\n\n" for line in lines) + DONE
            return Response(body, media_type="text/event-stream")

        async def models(request: Request) -> Response:
            base = {"id": "m", "owned_by": "sglang", "max_model_len": 4096, "parent": None}
            return JSONResponse({"data": [base, {"id": "lora-1", "owned_by": "sglang", "parent": "m"}]})

        async def server_info(request: Request) -> Response:
            return JSONResponse(info)

        async def metrics(request: Request) -> Response:
            return PlainTextResponse("sglang:num_running_reqs 3\nsglang:num_queue_reqs 2\nsglang:token_usage 0.5\n")

        self.app = Starlette(
            routes=[
                Route("/generate", generate, methods=["POST"]),
                Route("/v1/models", models),
                Route("/server_info", server_info),
                Route("/metrics", metrics),
                Route("/health", lambda request: Response()),
            ]
        )


async def run(server: Server, use: Callable[[SglangEngine], Any]) -> Any:
    with LiveServer(server.app) as live:
        engine = SglangEngine(Upstream(live.url))
        await engine.capabilities()
        try:
            return await use(engine)
        finally:
            await engine.aclose()


def ask(model: str = "m", priority: int = 0, **sampling: Any) -> GenerateRequest:
    packed = pack([5, 6, 7])

    async def whole() -> bytes:
        return packed

    return GenerateRequest("r", model, IdsPrompt(packed, 3, whole), Sampling(9, **sampling), "salt", priority)


async def say(engine: SglangEngine, request: GenerateRequest) -> str:
    return "".join([delta.text async for delta in engine.generate(request)])


async def test_the_request_is_the_native_one_with_the_salt_and_no_field_that_was_not_asked_for() -> None:
    server = Server(*WHOLE)
    assert await run(server, lambda engine: say(engine, ask(temperature=0.0))) == "ab"
    body = server.asked[0]
    assert body["input_ids"] == [5, 6, 7]
    assert (body["cache_salt"], body["extra_key"], body["stream"]) == ("salt", "salt", True)
    assert {"priority", "lora_path"}.isdisjoint(body)
    assert {"sampling_seed", "logit_bias", "stop", "json_schema"}.isdisjoint(body["sampling_params"])
    assert body["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize(
    ("info", "sent"),
    [
        ({"enable_priority_scheduling": True}, -2),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, 2),
        ({}, None),
    ],
)
async def test_priority_is_sent_as_the_server_orders_it(info: dict[str, Any], sent: int | None) -> None:
    server = Server(*WHOLE, **info)
    await run(server, lambda engine: say(engine, ask(priority=2)))
    assert server.asked[0].get("priority") == sent


async def test_an_adapter_is_asked_for_by_its_path_and_grammars_by_their_fields() -> None:
    server = Server(*WHOLE)
    await run(server, lambda engine: say(engine, ask("lora-1", grammar=Grammar("regex", "a+"), seed=4)))
    assert server.asked[0]["lora_path"] == "lora-1"
    assert (server.asked[0]["sampling_params"]["regex"], server.asked[0]["sampling_params"]["sampling_seed"]) == (
        "a+",
        4,
    )
    with pytest.raises(Unsupported):
        await run(server, lambda engine: say(engine, ask(grammar=Grammar("lark", "x"))))


async def test_a_refusal_inside_a_200_is_a_refusal() -> None:
    server = Server({"error": {"message": "temperature must be a non-negative finite number, got -1."}})
    with pytest.raises(RequestRefused):
        await run(server, lambda engine: say(engine, ask()))


async def test_a_field_that_the_release_does_not_know_is_named() -> None:
    said = "SamplingParams.__init__() got an unexpected keyword argument 'sampling_seed'"
    with pytest.raises(Unsupported) as caught:
        await run(Server({"error": {"message": said}}, status=400), lambda engine: say(engine, ask(seed=1)))
    assert caught.value.param == "sampling_seed"


async def test_an_abort_before_the_first_delta_is_overload_and_after_it_a_loss() -> None:
    abort = event("", [], 0, {"type": "abort", "message": "The request queue is full.", "status_code": 503})
    with pytest.raises(EngineOverloaded):
        await run(Server(abort), lambda engine: say(engine, ask()))
    with pytest.raises(EngineLost):
        await run(Server(WHOLE[0], abort), lambda engine: say(engine, ask()))


async def test_what_it_can_do_is_probed_and_what_it_hides_is_named() -> None:
    found = await run(Server(page_size=64, max_running_requests=7), lambda engine: engine.capabilities())
    assert (found.models, found.adapters, found.window) == (("m", "lora-1"), ("lora-1",), 4096)
    assert (found.block_size, found.max_running, found.takes_salt) == (64, 7, True)
    assert {"tokenizer", "epoch", "images"} <= set(found.unseen)


async def test_load_comes_from_metrics_where_there_is_no_list_of_loads() -> None:
    assert await run(Server(), lambda engine: engine.load()) == EngineLoad(3, 2, 0.5)


def test_the_loads_of_all_ranks_are_added_up() -> None:
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 1, "max_total_num_tokens": 100, "num_used_tokens": 30}
    found = read_loads({"loads": [rank | {"token_usage": 0.2}, rank | {"token_usage": 0.4}], "new": "field"})
    assert (found.running, found.waiting, found.kv_blocks_total, found.kv_blocks_used) == (4, 2, 200, 60)
    assert found.kv_used_ratio == pytest.approx(0.3)
    assert read_loads({"loads": []}) == EngineLoad()
