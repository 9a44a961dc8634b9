"""The vLLM adapter against a running vLLM: set TURNKEEP_TEST_VLLM_URL to its address."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from engines.contract import (
    ChatPrompt,
    ContextOverflow,
    Delta,
    Engine,
    GenerateRequest,
    IdsPrompt,
    RequestRefused,
    Sampling,
)
from engines.echo_tokens import pack
from engines.remote.connect import connect
from engines.remote.vllm import VllmEngine

URL = os.environ.get("TURNKEEP_TEST_VLLM_URL", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not URL, reason="TURNKEEP_TEST_VLLM_URL names no running vLLM"),
]


@pytest.fixture
async def vllm() -> AsyncIterator[Engine]:
    engine = await connect(URL, api_key=os.environ.get("TURNKEEP_TEST_VLLM_KEY"))
    yield engine
    await engine.aclose()


async def ask(engine: Engine, prompt: IdsPrompt | ChatPrompt, *, max_tokens: int = 16) -> list[Delta]:
    model = (await engine.capabilities()).models[0]
    request = GenerateRequest("r", model, prompt, Sampling(max_tokens, temperature=0.0), "salt-of-a-test")
    return [delta async for delta in engine.generate(request)]


async def ids(engine: Engine, text: str, times: int = 1) -> IdsPrompt:
    tokens = await engine.tokenize(text, model=(await engine.capabilities()).models[0])
    assert tokens
    packed = pack(tokens * times)

    async def whole() -> bytes:
        return packed

    return IdsPrompt(packed, len(packed) // 4, whole)


async def test_it_is_recognised_with_its_window(vllm: Engine) -> None:
    assert isinstance(vllm, VllmEngine)
    found = await vllm.capabilities()
    assert found.models
    assert found.window
    assert "request_fields" not in found.unseen


async def test_ids_come_back_with_the_text(vllm: Engine) -> None:
    deltas = await ask(vllm, await ids(vllm, "The capital of France is"))
    assert "".join(delta.text for delta in deltas)
    assert deltas[-1].usage is not None
    assert sum(len(delta.ids) for delta in deltas) == deltas[-1].usage.output_tokens


async def test_messages_are_answered(vllm: Engine) -> None:
    deltas = await ask(vllm, ChatPrompt([{"role": "user", "content": "Say hello."}]))
    assert "".join(delta.text + delta.reasoning for delta in deltas)
    assert deltas[-1].finish in ("stop", "length")


async def test_a_prompt_over_the_window_names_both_numbers(vllm: Engine) -> None:
    window = (await vllm.capabilities()).window
    assert window
    with pytest.raises(ContextOverflow) as caught:
        await ask(vllm, await ids(vllm, "word word word word", times=window))
    assert caught.value.limit == window
    assert caught.value.requested is not None


async def test_a_model_that_is_not_there_is_refused(vllm: Engine) -> None:
    request = GenerateRequest("r", "no-such-model", await ids(vllm, "x"), Sampling(1))
    with pytest.raises(RequestRefused) as caught:
        await anext(vllm.generate(request))
    assert caught.value.code == "model_not_found"


async def test_a_closed_answer_ends_in_the_engine(vllm: Engine) -> None:
    model = (await vllm.capabilities()).models[0]
    request = GenerateRequest("r", model, await ids(vllm, "Once"), Sampling(2000, ignore_eos=True))
    answer = vllm.generate(request)
    await anext(answer)
    await answer.aclose()
    async with asyncio.timeout(3):
        while (await vllm.load()).running:  # noqa: ASYNC110 - it runs elsewhere
            await asyncio.sleep(0.1)
