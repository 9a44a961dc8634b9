"""The vLLM adapter, and the gateway, against a real vLLM: `make test-peers`.

TURNKEEP_TEST_VLLM_URL names a running one; else one is started with the small model by the Python that
TURNKEEP_TEST_VLLM_PYTHON names. What is asserted here is what a stand-in could get wrong.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.contract import (
    ChatPrompt,
    ContextOverflow,
    Delta,
    Engine,
    Forwards,
    GenerateRequest,
    Grammar,
    IdsPrompt,
    RequestRefused,
    Sampling,
)
from engines.echo_tokens import pack
from engines.remote.connect import connect
from engines.remote.vllm import VllmEngine
from tests.gateway.live import live_gateway

URL = os.environ.get("TURNKEEP_TEST_VLLM_URL", "")
PYTHON = os.environ.get("TURNKEEP_TEST_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not URL and not PYTHON, reason="no vLLM: TURNKEEP_TEST_VLLM_URL names one, make test-peers fetches one"
    ),
]
READY_S = 600.0  # it imports and warms up for a minute, on loaded cores for three
OPTIONS = ("--served-model-name", "small", "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if URL:
        yield URL
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model: Path = request.getfixturevalue("model_dir")
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enable-prompt-tokens-details", "--max-num-seqs", "8", *OPTIONS]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with (
        log.open("wb") as said,
        subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        ) as server,
    ):
        try:
            deadline = time.monotonic() + READY_S
            while not _healthy(port):
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(1)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)  # its engine is a process of its own
            server.wait(60)


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
async def vllm(url: str) -> AsyncIterator[Engine]:
    engine = await connect(url, api_key=os.environ.get("TURNKEEP_TEST_VLLM_KEY"))
    yield engine
    await engine.aclose()


async def ask(
    engine: Engine, prompt: IdsPrompt | ChatPrompt, *, salt: str = "salt-of-a-test", **sampling: Any
) -> list[Delta]:
    model = (await engine.capabilities()).models[0]
    options = Sampling(**{"max_tokens": 16, "temperature": 0.0, **sampling})
    request = GenerateRequest("r", model, prompt, options, salt)
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


async def test_a_prefix_is_found_again_under_its_salt_and_under_no_other(vllm: Engine) -> None:
    found = await vllm.capabilities()
    assert found.block_size
    long = await ids(vllm, "The long way home goes by the sea. ", times=found.block_size // 4)
    cached = []
    for salt in ("A", "A", "B"):
        last = (await ask(vllm, long, salt=f"{salt}-{os.getpid()}"))[-1]
        assert last.usage is not None
        cached.append(last.usage.cached_tokens)
    if cached == [None] * 3:
        pytest.skip("it tells no cached tokens: start it with --enable-prompt-tokens-details")
    assert cached[0] == cached[2] == 0
    assert (cached[1] or 0) >= found.block_size


async def test_grammars_stop_strings_and_stop_ids_are_followed(vllm: Engine) -> None:
    prompt = await ids(vllm, "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n")
    found = await vllm.capabilities()
    schema = Grammar("json_schema", '{"const": "世界😀"}')
    assert said(await ask(vllm, prompt, max_tokens=40, grammar=schema)) == '"世界😀"'
    if "regex" in found.grammars:
        assert said(await ask(vllm, prompt, max_tokens=40, grammar=Grammar("regex", "ab{3}c"))) == "abbbc"
    plain = await ask(vllm, prompt)
    text, tokens = said(plain), [id for delta in plain for id in delta.ids]
    cut = await ask(vllm, prompt, stop=(text[3:6],))
    assert (said(cut), cut[-1].stop) == (text[: text.index(text[3:6])], text[3:6])
    ended = await ask(vllm, prompt, stop_token_ids=(tokens[2],))
    assert [id for delta in ended for id in delta.ids] == tokens[:3]


async def test_completions_are_passed_on(vllm: Engine) -> None:
    assert isinstance(vllm, Forwards)
    found = await vllm.capabilities()
    assert "/v1/completions" in found.routes
    fields = {"model": found.models[0], "prompt": "The sea is", "max_tokens": 4, "temperature": 0}
    whole = await vllm.forward("/v1/completions", fields, request_id="r1", salt="A")
    stream = vllm.forward_stream("/v1/completions", {**fields, "stream": True}, request_id="r2", salt="A")
    told = "".join([choice["text"] async for event in stream for choice in event["choices"]])
    assert told == whole["choices"][0]["text"]


async def test_an_answer_longer_than_the_window_is_an_overflow(vllm: Engine) -> None:
    window = (await vllm.capabilities()).window
    assert window
    with pytest.raises(ContextOverflow) as caught:
        await ask(vllm, await ids(vllm, "x"), max_tokens=window + 5)
    assert (caught.value.limit, caught.value.requested) == (window, window + 5)


async def test_a_conversation_through_the_gateway_goes_by_ids(
    url: str, vllm: Engine, model_dir: Path, tmp_path: Path
) -> None:
    model = (await vllm.capabilities()).models[0]
    async with live_gateway(tmp_path, upstreams=url, embed=False, tokenizers={model: model_dir}) as live:
        if live.app.state.gateway.models.problems:
            pytest.skip(f"it serves another model than {model_dir.name}")
        sid = await live.session(model=model, system="You answer in one word. " * 40)
        turns = [
            (await live.client.post(f"/v1/sessions/{sid}/turns", json={"input": text, "max_output_tokens": 12})).json()
            for text in ("Hello, who are you?", "And what is the sea?")
        ]
    assert [turn["metadata"]["mode"] for turn in turns] == ["ids"] * 2
    assert turns[1]["prefix_report"]["cause"] is None
    if turns[1]["usage"]["cached_tokens"] is not None:
        assert turns[1]["usage"]["cached_tokens"] >= 128


def said(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_a_model_that_is_not_there_is_refused(vllm: Engine) -> None:
    request = GenerateRequest("r", "no-such-model", await ids(vllm, "x"), Sampling(1))
    with pytest.raises(RequestRefused) as caught:
        await anext(vllm.generate(request))
    assert caught.value.code == "model_not_found"


async def test_a_closed_answer_ends_in_the_engine(vllm: Engine) -> None:
    found = await vllm.capabilities()
    request = GenerateRequest("r", found.models[0], await ids(vllm, "Once"), Sampling(500, ignore_eos=True))
    answer = vllm.generate(request)
    await anext(answer)
    await answer.aclose()
    async with asyncio.timeout(3):
        while (await vllm.load()).running:  # noqa: ASYNC110 - it runs elsewhere
            await asyncio.sleep(0.1)
