"""The adapters against our own engine on the real model: its wire, and its door for whoever takes it for a vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from engines.contract import (
    Capabilities,
    ContextOverflow,
    Delta,
    Engine,
    Forwards,
    GenerateRequest,
    IdsPrompt,
    Sampling,
)
from engines.echo_tokens import pack
from engines.remote.connect import Kind, connect
from tests.engines.running import RunningEngine, running_engine

pytestmark = [pytest.mark.anyio, pytest.mark.model]
OPTIONS = {"served_name": "small", "pool_bytes": 256 << 20, "threads": 1, "max_batch_tokens": 128}
PROMPT = "<|im_start|>user\nName the colours of the {}, one after the other.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def running(model_dir: Path) -> Iterator[RunningEngine]:
    with running_engine(OPTIONS | {"model": str(model_dir)}) as found:
        yield found


@pytest.fixture(params=["turnkeep", "vllm"])
async def engine(request: pytest.FixtureRequest, running: RunningEngine) -> AsyncIterator[Engine]:
    assert request.param in get_args(Kind)
    found = await connect(running.url, kind=request.param)
    yield found
    await found.aclose()


async def ask(engine: Engine, text: str, *, salt: str = "", **sampling: Any) -> list[Delta]:
    tokens = await engine.tokenize(text, model="small")
    assert tokens
    packed = pack(tokens)

    async def whole() -> bytes:
        return packed

    options = Sampling(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    request = GenerateRequest("r", "small", IdsPrompt(packed, len(tokens), whole), options, salt)
    return [delta async for delta in engine.generate(request)]


async def test_both_doors_say_the_same_ids(running: RunningEngine) -> None:
    answers = []
    for kind in ("turnkeep", "vllm"):
        engine = await connect(running.url, kind=kind)  # type: ignore[arg-type]
        answers.append([id for delta in await ask(engine, PROMPT.format("sea")) for id in delta.ids])
        await engine.aclose()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


async def test_a_prompt_is_found_again_under_its_salt_and_under_no_other(engine: Engine) -> None:
    text, block = PROMPT.format(f"sky over {type(engine).__name__}") * 3, 32
    cached = []
    for salt in ("A", "A", "B"):
        last = (await ask(engine, text, salt=salt))[-1]
        assert last.usage is not None
        cached.append(last.usage.cached_tokens)
    assert (cached[0], cached[2]) == (0, 0)
    assert (cached[1] or 0) >= block


async def test_what_it_can_do_is_told(engine: Engine) -> None:
    found: Capabilities = await engine.capabilities()
    assert (found.models, found.takes_ids, found.returns_ids) == (("small",), True, True)
    assert found.window
    if found.kind == "turnkeep":
        assert (found.keeps_sessions, found.prefills, found.takes_salt, found.max_running) == (True, True, True, 32)
        assert found.routes == {"/v1/completions"}


async def test_too_long_a_prompt_names_both_numbers(engine: Engine) -> None:
    window = (await engine.capabilities()).window
    assert window
    with pytest.raises(ContextOverflow) as caught:
        await ask(engine, "word " * (window + 10))
    assert caught.value.limit == window
    assert (caught.value.requested or 0) > window


async def test_completions_are_passed_on_whole_and_as_they_come(engine: Engine) -> None:
    assert isinstance(engine, Forwards)
    fields = {"model": "small", "prompt": "The sea is", "max_tokens": 5, "temperature": 0}
    whole = await engine.forward("/v1/completions", fields, request_id="r", salt="A")
    stream = engine.forward_stream("/v1/completions", {**fields, "stream": True}, request_id="r", salt="A")
    events = [event async for event in stream]
    said = "".join(choice["text"] for event in events for choice in event["choices"])
    assert said == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 5
