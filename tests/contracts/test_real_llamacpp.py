"""The llama.cpp adapter, and the gateway, against a real llama.cpp server: `make test-peers`.

TURNKEEP_TEST_LLAMACPP_URL names a running one; else one is started from the wheel `xllamacpp` with the GGUF file that
TURNKEEP_TEST_GGUF names. What is asserted here is what a stand-in could get wrong.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from engines.contract import (
    Capabilities,
    ChatPrompt,
    ContextOverflow,
    Delta,
    EngineError,
    GenerateRequest,
    Grammar,
    IdsPrompt,
    RequestRefused,
    Sampling,
)
from engines.echo_tokens import pack
from engines.remote.connect import connect
from engines.remote.llamacpp import LlamaCppEngine
from gateway.sessions.models import PROOF_TEXTS
from tests.contracts.llamacpp_server import SLOTS
from tests.gateway.live import live_gateway

URL = os.environ.get("TURNKEEP_TEST_LLAMACPP_URL", "")
GGUF = os.environ.get("TURNKEEP_TEST_GGUF", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not URL and find_spec("xllamacpp") is None, reason="xllamacpp is not installed: make test-peers"
    ),
    pytest.mark.skipif(not URL and not GGUF, reason="TURNKEEP_TEST_GGUF names no GGUF file: make test-peers"),
]
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    if URL:
        yield URL
        return
    command = [sys.executable, "-m", "tests.contracts.llamacpp_server", GGUF]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        found = server.stdout.readline().strip()
        assert found, "llama.cpp's server did not start"
        yield found
        assert server.stdin is not None
        server.stdin.close()
        server.wait(20)


@pytest.fixture
async def llama(url: str) -> AsyncIterator[tuple[LlamaCppEngine, Capabilities]]:
    engine = await connect(url, name="llama")
    assert isinstance(engine, LlamaCppEngine)
    yield engine, await engine.capabilities()
    await engine.aclose()


Llama = tuple[LlamaCppEngine, Capabilities]


async def prompt(llama: Llama, text: str, session: str | None = None) -> IdsPrompt:
    tokens = await llama[0].tokenize(PROMPT.format(text), model=llama[1].models[0])
    assert tokens
    packed = pack(tokens)

    async def whole() -> bytes:
        return packed

    return IdsPrompt(packed, len(tokens), whole, session)


async def ask(llama: Llama, prompt: IdsPrompt | ChatPrompt, *, salt: str = "A", **sampling: object) -> list[Delta]:
    options = Sampling(**{"max_tokens": 16, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    request = GenerateRequest("r", llama[1].models[0], prompt, options, salt)
    return [delta async for delta in llama[0].generate(request)]


def told(deltas: list[Delta]) -> tuple[str, list[int], Delta]:
    return "".join(d.text for d in deltas), [id for d in deltas for id in d.ids], deltas[-1]


async def test_it_is_recognised_with_its_window_its_slots_and_its_life(llama: Llama) -> None:
    found = llama[1]
    assert (found.kind, found.max_running, found.takes_images) == ("llamacpp", SLOTS, False)
    assert found.window
    assert found.epoch
    assert "/v1/completions" in found.routes
    assert "/v1/embeddings" not in found.routes  # 501, for it was started without
    assert (await llama[0].load()).running == 0


async def test_the_ids_are_all_there_and_read_as_the_text(url: str, llama: Llama) -> None:
    text, ids, last = told(await ask(llama, await prompt(llama, "Name three colours.")))
    assert text
    assert last.usage is not None
    assert len(ids) == last.usage.output_tokens
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{url}/detokenize", json={"tokens": ids})
    assert reply.json()["content"].startswith(text)


async def test_ids_of_characters_that_it_leaves_out_are_completed(url: str, llama: Llama) -> None:
    schema = Grammar("json_schema", '{"const": "世界😀"}')
    text, ids, last = told(await ask(llama, await prompt(llama, "x"), max_tokens=40, grammar=schema))
    assert text == '"世界😀"'
    assert last.usage is not None
    assert len(ids) == last.usage.output_tokens
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{url}/detokenize", json={"tokens": ids})
    assert reply.json()["content"].startswith(text)


async def test_a_session_reuses_its_slot_and_another_tenant_reuses_nothing(llama: Llama) -> None:
    asked = await prompt(llama, "Tell me of the sea, the wind, the stars and the long way home.", "s1")
    first, again = told(await ask(llama, asked))[2], told(await ask(llama, asked))[2]
    foreign = told(await ask(llama, asked, salt="B"))[2]
    cached = [last.usage.cached_tokens for last in (first, again, foreign) if last.usage is not None]
    assert cached == [0, asked.num_tokens - 1, 0]


async def test_forgetting_leaves_nothing_to_reuse(llama: Llama) -> None:
    asked = await prompt(llama, "A secret that is to be forgotten, every word of it.", "s2")
    await ask(llama, asked)
    await llama[0].forget("s2", "t")
    last = told(await ask(llama, asked))[2]
    assert last.usage is not None
    assert last.usage.cached_tokens == 0


async def test_a_stop_string_and_a_stop_id_end_the_answer_before_them(llama: Llama) -> None:
    asked = await prompt(llama, "Count to nine.")
    text, ids, _ = told(await ask(llama, asked))
    stop = text[3:6]
    cut, _, last = told(await ask(llama, asked, stop=(stop,)))
    assert (cut, last.stop, last.finish) == (text[: text.index(stop)], stop, "stop")
    short, fewer, _ = told(await ask(llama, asked, stop_token_ids=(ids[2],)))
    assert fewer == ids[:3]
    assert text.startswith(short)


async def test_logprobs_name_their_tokens(llama: Llama) -> None:
    deltas = await ask(llama, await prompt(llama, "Hi"), max_tokens=3, logprobs=2)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.id for entry in entries] == [id for delta in deltas for id in delta.ids]
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in entries)


async def test_messages_are_answered(llama: Llama) -> None:
    deltas = await ask(llama, ChatPrompt([{"role": "user", "content": "Say hello."}]))
    assert told(deltas)[0]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.cached_tokens is not None


async def test_a_conversation_by_messages_comes_back_to_its_slot(llama: Llama) -> None:
    messages = [{"role": "user", "content": "What is the sea like, and what lives in it, far below?"}]
    first = told(await ask(llama, ChatPrompt(messages)))
    await ask(llama, ChatPrompt([{"role": "user", "content": "Something else."}]))
    messages += [{"role": "assistant", "content": first[0]}, {"role": "user", "content": "And above?"}]
    last = told(await ask(llama, ChatPrompt(messages)))[2]
    assert first[2].usage is not None
    assert last.usage is not None
    assert (last.usage.cached_tokens or 0) >= first[2].usage.prompt_tokens


async def test_completions_are_passed_on(llama: Llama) -> None:
    fields = {"model": llama[1].models[0], "prompt": "The sea is", "max_tokens": 4, "temperature": 0}
    whole = await llama[0].forward("/v1/completions", fields, request_id="r", salt="A")
    stream = llama[0].forward_stream("/v1/completions", {**fields, "stream": True}, request_id="r", salt="A")
    events = [event async for event in stream]
    assert "".join(c["text"] for event in events for c in event["choices"]) == whole["choices"][0]["text"]


async def test_a_prompt_over_the_window_names_both_numbers(llama: Llama) -> None:
    window = llama[1].window
    assert window
    for long in (await prompt(llama, "word " * window), ChatPrompt([{"role": "user", "content": "word " * window}])):
        with pytest.raises(ContextOverflow) as caught:
            await ask(llama, long)
        assert caught.value.limit == window
        assert (caught.value.requested or 0) > window


async def test_what_it_does_not_serve_is_refused_here(llama: Llama) -> None:
    request = GenerateRequest("r", "no-such-model", await prompt(llama, "x"), Sampling(1))
    with pytest.raises(RequestRefused) as caught:
        await anext(llama[0].generate(request))
    assert caught.value.code == "model_not_found"
    with pytest.raises(EngineError):
        await llama[0].forward("/v1/embeddings", {"input": "x"}, request_id="r", salt="")


async def test_a_closed_answer_ends_in_the_engine(llama: Llama) -> None:
    asked = await prompt(llama, "Once")
    request = GenerateRequest("r", llama[1].models[0], asked, Sampling(900, ignore_eos=True))
    answer = llama[0].generate(request)
    await anext(answer)
    assert (await llama[0].load()).running == 1
    await answer.aclose()
    async with asyncio.timeout(3):
        while (await llama[0].load()).running:  # noqa: ASYNC110 - it runs elsewhere
            await asyncio.sleep(0.05)


async def test_it_reads_the_same_ids_as_the_model_folder(llama: Llama, model_dir: Path) -> None:
    from tokenizers import Tokenizer

    ours = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for text in PROOF_TEXTS:
        theirs = await llama[0].tokenize(text, model="any")
        assert theirs == ours.encode(text, add_special_tokens=False).ids


async def test_a_conversation_through_the_gateway_goes_by_ids_and_is_cached(
    url: str, llama: Llama, model_dir: Path, tmp_path: Path
) -> None:
    model = llama[1].models[0]
    async with live_gateway(tmp_path, upstreams=url, embed=False, tokenizers={model: model_dir}) as live:
        sid = await live.session(model=model)
        turns = [
            (await live.client.post(f"/v1/sessions/{sid}/turns", json={"input": text, "max_output_tokens": 12})).json()
            for text in ("Hello, who are you?", "And what is the sea?", "Thank you.")
        ]
    assert [turn["metadata"]["mode"] for turn in turns] == ["ids"] * 3, turns
    prompts = [turn["usage"]["prompt_tokens"] for turn in turns]
    outputs = [turn["usage"]["output_tokens"] for turn in turns]
    cached = [turn["usage"]["cached_tokens"] for turn in turns]
    # all that the slot had computed: its last token was never run through the model
    assert cached[1:] == [prompts[0] + outputs[0] - 1, prompts[1] + outputs[1] - 1]
