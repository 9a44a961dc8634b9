"""vLLM's own ways: what is sent, what is probed, what is adapted to."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engines.contract import (
    Base,
    ChatPrompt,
    Delta,
    EngineUnreachable,
    GenerateRequest,
    Grammar,
    IdsPrompt,
    Sampling,
    Unsupported,
)
from engines.echo import EchoEngine
from engines.echo_tokens import encode, pack
from engines.remote.metrics import VLLM, Metrics
from engines.remote.vllm import VllmEngine
from tests.contracts import vllm_app
from tests.contracts.subjects import Subject, behind_socket, chatml, vllm_chat, vllm_ids

pytestmark = pytest.mark.anyio


def vllm(**app: Any) -> Any:
    def create(engine: EchoEngine) -> Any:
        return vllm_app.create_app(engine, **app)

    return behind_socket(create, (vllm_app.COMPLETIONS, vllm_app.CHAT), VllmEngine, ids=True)


async def sent(subject: Subject, request: GenerateRequest) -> dict[str, Any]:
    """The body of the request's last attempt."""
    async for _ in subject.engine.generate(request):
        pass
    assert subject.layer is not None
    body = orjson.loads(subject.layer.requests[-1])
    assert isinstance(body, dict)
    return body


async def test_ids_go_as_a_prompt_of_ids_with_everything_explicit() -> None:
    async with vllm_ids() as subject:
        request = subject.ask("hi", max_tokens=9, seed=4, stop=("x",), stop_token_ids=(258,), min_p=0.1, logprobs=1)
        body = await sent(subject, GenerateRequest("r", "echo", request.prompt, request.sampling, "salt-1"))
        assert body["prompt"] == encode(chatml("hi"))
        expected = {
            "max_tokens": 9, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.1, "seed": 4, "stop": ["x"],
            "stop_token_ids": [258], "repetition_penalty": 1.0, "cache_salt": "salt-1", "return_token_ids": True,
            "skip_special_tokens": True, "logprobs": 1, "stream_options": {"include_usage": True},
        }  # fmt: skip
        assert {name: body.get(name) for name in expected} == expected
        assert "priority" not in body


async def test_a_base_is_made_whole_for_it() -> None:
    async with vllm_ids() as subject:
        everything = pack(encode("earlier" + chatml("hi")))

        async def whole() -> bytes:
            return everything

        prompt = IdsPrompt(pack([1]), len(everything) // 4, whole, "s", Base(7, bytes(32)))
        assert (await sent(subject, GenerateRequest("r", "echo", prompt, Sampling(5))))["prompt"] == encode(
            "earlier" + chatml("hi")
        )


async def test_messages_go_with_tools_format_and_options() -> None:
    async with vllm_chat() as subject:
        prompt = ChatPrompt(
            [{"role": "user", "content": "hi"}],
            parallel_tool_calls=False,
            template_options={"enable_thinking": False},
            reasoning_effort="low",
        )
        body = await sent(subject, GenerateRequest("r", "echo", prompt, Sampling(5, logprobs=2)))
        assert body["messages"] == [{"role": "user", "content": "hi"}]
        assert body["chat_template_kwargs"] == {"enable_thinking": False}
        assert (body["reasoning_effort"], body["parallel_tool_calls"]) == ("low", False)
        assert (body["logprobs"], body["top_logprobs"]) == (True, 2)


async def test_a_server_without_a_tool_parser_says_so() -> None:
    async with vllm_chat() as subject:
        prompt = ChatPrompt([{"role": "user", "content": "hi"}], tool_choice="auto")
        with pytest.raises(Unsupported) as caught:
            await sent(subject, GenerateRequest("r", "echo", prompt, Sampling(5)))
        assert caught.value.param == "tools"


async def test_a_priority_that_is_refused_is_left_out_from_then_on() -> None:
    async with vllm_ids() as subject:
        request = subject.ask("hi")
        low = GenerateRequest("r", "echo", request.prompt, request.sampling, priority=10)
        assert "priority" not in await sent(subject, low)
        assert subject.layer is not None
        assert len(subject.layer.requests) == 2
        await sent(subject, low)
        assert len(subject.layer.requests) == 3


async def test_a_priority_is_sent_where_it_is_taken() -> None:
    async with vllm(priorities=True) as subject:
        request = subject.ask("hi")
        body = await sent(subject, GenerateRequest("r", "echo", request.prompt, request.sampling, priority=10))
        assert body["priority"] == 10


@pytest.mark.parametrize(
    ("grammar", "field", "value"),
    [
        (Grammar("json_object"), "response_format", {"type": "json_object"}),
        (Grammar("json_schema", '{"type": "object"}'), "response_format",
         {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True}}),
        (Grammar("regex", "a+"), "structured_outputs", {"regex": "a+"}),
    ],
)  # fmt: skip
async def test_a_grammar_goes_where_vllm_looks_for_it(grammar: Grammar, field: str, value: object) -> None:
    async with vllm_ids() as subject:
        assert grammar.kind in (await subject.engine.capabilities()).grammars
        assert (await sent(subject, subject.ask("hi", grammar=grammar)))[field] == value


async def test_a_lark_grammar_is_unsupported() -> None:
    async with vllm_ids() as subject:
        with pytest.raises(Unsupported):
            await sent(subject, subject.ask("hi", grammar=Grammar("lark", "start: /a/")))


async def test_capabilities_are_read_from_its_own_pages() -> None:
    async with vllm_ids(window=777) as subject:
        found = await subject.engine.capabilities()
        assert (found.kind, found.window, found.block_size, found.epoch) == ("vllm", 777, 16, "1795987000.000")
        assert found.returns_ids
        assert {"min_p", "stop_token_ids", "ignore_eos"} <= found.sampling
        assert "cached_tokens" in found.unseen
        await sent(subject, subject.ask("hi"))
        found = await subject.engine.capabilities()
        assert found.reports_cached
        assert "cached_tokens" not in found.unseen


async def test_cached_tokens_are_unknown_where_it_does_not_tell() -> None:
    async with vllm(prompt_details=False) as subject:
        deltas: list[Delta] = [delta async for delta in subject.engine.generate(subject.ask("hi"))]
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.cached_tokens is None
        assert not (await subject.engine.capabilities()).reports_cached


async def test_load_reads_its_metrics() -> None:
    async with vllm_ids() as subject:
        load = await subject.engine.load()
        assert (load.running, load.kv_used_ratio, load.kv_blocks_total, load.kv_blocks_used) == (0, 0.25, 400, 100)


async def test_a_dead_server_has_no_load() -> None:
    async with vllm_ids() as subject:
        assert subject.proxy is not None
        await subject.proxy.__aexit__(None, None, None)
        with pytest.raises(EngineUnreachable):
            await subject.engine.load()
        await subject.proxy.__aenter__()


def test_older_metric_names_are_read_and_missing_ones_named() -> None:
    metrics = Metrics('vllm:gpu_cache_usage_perc{a="b"} 0.5\nvllm:num_requests_running 2\n# a comment\nbroken line\n')
    assert metrics.load(VLLM).kv_used_ratio == 0.5
    assert metrics.load(VLLM).running == 2
    assert metrics.unseen(VLLM) == ("vllm:num_requests_waiting",)
    assert metrics.epoch(VLLM) is None


def test_ranks_are_added_up_and_ratios_averaged() -> None:
    metrics = Metrics(
        'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
    )
    assert metrics.load(VLLM).running == 5
    assert metrics.load(VLLM).kv_used_ratio == pytest.approx(0.3)
