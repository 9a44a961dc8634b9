"""EchoEngine's own promises: its prefix accounting, its pace, its faults, and the files of its tokenizer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import cast

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engines.contract import (
    EMPTY_DIGEST,
    Base,
    ChatPrompt,
    Delta,
    EngineLost,
    EngineOverloaded,
    EngineUnreachable,
    Generated,
    GenerateRequest,
    IdsPrompt,
    RequestRefused,
    Sampling,
    chain_digest,
)
from engines.echo import ECHO_MODEL_DIR, EchoEngine, lorem, plan_answer
from engines.echo_tokens import IM_END, decode, encode, pack

pytestmark = pytest.mark.anyio


def ids_request(text: str, *, session: str | None = None, salt: str = "", base: Base | None = None, before: str = "",
                sampling: Sampling | None = None) -> GenerateRequest:  # fmt: skip
    delta = pack(encode(text))

    async def whole() -> bytes:
        return pack(encode(before + text))

    tokens = len(encode(before + text))
    prompt = IdsPrompt(delta, tokens, whole, session, base)
    return GenerateRequest("r", "echo", prompt, sampling or Sampling(64), salt)


def turn(user: str) -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


async def run(engine: EchoEngine, request: GenerateRequest) -> list[Delta]:
    deltas = [delta async for delta in engine.generate(request)]
    engine.paths.check()
    return deltas


def cached(deltas: Sequence[Delta]) -> int:
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.cached_tokens is not None
    return usage.cached_tokens


async def test_it_says_the_last_user_message_back() -> None:
    deltas = await run(EchoEngine(), ids_request(turn("first") + turn("héllo 世界 😀")))
    assert "".join(delta.text for delta in deltas) == "héllo 世界 😀"
    assert [i for delta in deltas for i in delta.ids] == [*"héllo 世界 😀".encode(), IM_END]
    assert deltas[-1].finish == "stop"


async def test_a_session_reuses_all_but_the_last_generated_token() -> None:
    engine = EchoEngine()
    first = turn("hello there")
    answer = await run(engine, ids_request(first, session="s", salt="t"))
    assert cached(answer) == 0
    said = [i for delta in answer for i in delta.ids]
    digest = chain_digest(chain_digest(EMPTY_DIGEST, pack(encode(first))), pack(said))
    length = len(encode(first)) + len(said)
    request = ids_request(
        "\n" + turn("again"), session="s", salt="t", base=Base(length, digest), before=first + decode(said)
    )
    assert cached(await run(engine, request)) == length - 1


async def test_an_unknown_base_asks_for_the_whole_prompt() -> None:
    engine = EchoEngine()
    request = ids_request(turn("two"), session="s", base=Base(9, bytes(32)), before=turn("one"))
    deltas = await run(engine, request)
    assert "".join(delta.text for delta in deltas) == "two"
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.prompt_tokens == len(encode(turn("one") + turn("two")))


async def test_an_earlier_mark_is_a_branch() -> None:
    engine = EchoEngine()
    first = turn("x" * 100)
    await run(engine, ids_request(first, session="s"))
    at_prompt = Base(len(encode(first)), chain_digest(EMPTY_DIGEST, pack(encode(first))))
    deltas = await run(engine, ids_request("other" + turn("b"), session="s", base=at_prompt, before=first))
    assert cached(deltas) == at_prompt.length


async def test_background_work_goes_on_from_a_path_and_leaves_it_as_it_was() -> None:
    engine = EchoEngine()
    first = turn("hello")
    said = await run(engine, ids_request(first, session="s"))
    answer = decode([token for delta in said for token in delta.ids])
    digest = chain_digest(chain_digest(EMPTY_DIGEST, pack(encode(first))), pack(encode(answer)))
    base = Base(len(encode(first + answer)), digest)
    more = ids_request("\n" + turn("sum up"), session="s", base=base, before=first + answer)
    low = await run(engine, replace(more, priority=1))
    assert cached(low) == base.length - 1
    assert cached(await run(engine, more)) >= base.length - 1
    assert engine.paths.cached_blocks > 0
    await engine.forget("s", "")
    assert engine.paths.cached_blocks == 0


async def test_whole_blocks_are_shared_between_sessions_of_one_salt_and_no_other() -> None:
    engine = EchoEngine(block_size=32)
    prompt = "<|im_start|>system\n" + "s" * 200 + "<|im_end|>\n" + turn("q")
    await run(engine, ids_request(prompt, session="a", salt="t"))
    blocks = len(encode(prompt)) // 32
    assert cached(await run(engine, ids_request(prompt, session="b", salt="t"))) in (
        blocks * 32,
        len(encode(prompt)) - 1,
    )
    assert cached(await run(engine, ids_request(prompt, session="b", salt="u"))) == 0


async def test_the_oldest_path_is_evicted_and_forget_frees_blocks() -> None:
    engine = EchoEngine(block_size=32, num_blocks=20)
    for name in "abcd":
        await run(engine, ids_request(turn(name * 200), session=name, sampling=Sampling(8)))
    assert (await engine.load()).kv_blocks_cached == 14  # two paths of (219 + 8) // 32 blocks; three would be 21
    assert cached(await run(engine, ids_request(turn("a" * 200), session="a", sampling=Sampling(8)))) == 0
    await engine.forget("a", "")
    await engine.forget("d", "")
    assert (await engine.load()).kv_blocks_cached == 0


async def test_a_closed_answer_is_marked_as_far_as_it_went() -> None:
    engine = EchoEngine(chunk_tokens=1)
    first = turn("hello")
    stream = cast(AsyncGenerator[Delta, None], engine.generate(ids_request(first, session="s")))
    assert (await anext(stream)).ids == (ord("h"),)
    await stream.aclose()
    digest = chain_digest(chain_digest(EMPTY_DIGEST, pack(encode(first))), pack([ord("h")]))
    assert engine.paths.holds("s", "", Base(len(encode(first)) + 1, digest))
    assert (await engine.load()).running == 0


@pytest.mark.parametrize(
    ("answer", "sampling", "text", "num_ids", "finish", "stop"),
    [
        ("hello", Sampling(10), "hello", 6, "stop", None),
        ("hello", Sampling(5), "hello", 5, "length", None),
        ("hello world", Sampling(20, stop=("xx", "lo w")), "hel", 7, "stop", "lo w"),
        ("hello world", Sampling(5, stop=("lo w",)), "hello", 5, "length", None),
        ("hello world", Sampling(20, stop=("world", "hello")), "", 5, "stop", "hello"),
        ("hello world", Sampling(20, stop_token_ids=(ord("w"),)), "hello ", 7, "stop", None),
        ("ab", Sampling(7, ignore_eos=True), "abababa", 7, "length", None),
        ("", Sampling(5), "", 1, "stop", None),
        ("é", Sampling(1), "\ufffd", 1, "length", None),
    ],
)
def test_where_an_answer_ends(
    answer: str, sampling: Sampling, text: str, num_ids: int, finish: str, stop: str | None
) -> None:
    ids, said, why, matched = plan_answer(answer, sampling)
    assert (said.decode("utf-8", "replace"), len(ids), why, matched) == (text, num_ids, finish, stop)


async def test_lorem_is_the_same_for_the_same_seed() -> None:
    engine = EchoEngine(answer=lorem)

    async def say(seed: int) -> str:
        deltas = await run(engine, ids_request(turn("hi"), sampling=Sampling(40, seed=seed)))
        assert deltas[-1].finish == "length"
        return "".join(delta.text for delta in deltas)

    assert await say(1) == await say(1) != await say(2)


async def test_its_pace_is_what_was_asked() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    engine = EchoEngine(tokens_per_s=10, prefill_tokens_per_s=100, chunk_tokens=5, sleep=sleep)
    await run(engine, ids_request(turn("123456789")))
    assert slept == pytest.approx([len(encode(turn("123456789"))) / 100, 0.5, 0.5])


async def test_it_fails_as_often_as_told_then_serves() -> None:
    engine = EchoEngine(fail_first=2, die_after=1, die_times=1)
    for _ in range(2):
        with pytest.raises(EngineUnreachable):
            await run(engine, ids_request(turn("hello")))
    dying = engine.generate(ids_request(turn("hello")))
    assert (await anext(dying)).text == "hell"
    with pytest.raises(EngineLost):
        await anext(dying)
    assert (await run(engine, ids_request(turn("hello"))))[-1].finish == "stop"


async def test_a_full_replica_refuses() -> None:
    engine = EchoEngine(max_running=1)
    stream = cast(AsyncGenerator[Delta, None], engine.generate(ids_request(turn("hello"))))
    await anext(stream)
    with pytest.raises(EngineOverloaded) as caught:
        await run(engine, ids_request(turn("x")))
    assert caught.value.retry_after_s == 1.0
    await stream.aclose()
    await run(engine, ids_request(turn("x")))


async def test_another_model_is_refused() -> None:
    request = ids_request(turn("x"))
    with pytest.raises(RequestRefused) as caught:
        await run(EchoEngine(model="other"), request)
    assert caught.value.code == "model_not_found"


async def test_messages_are_rendered_as_the_template_does() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ECHO_MODEL_DIR)
    messages = [{"role": "system", "content": "sé"}, {"role": "user", "content": "hello 世界"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    deltas = await run(EchoEngine(), GenerateRequest("r", "echo", ChatPrompt(messages), Sampling(64)))
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.prompt_tokens == len(rendered)
    assert encode(tokenizer.decode(rendered)) == rendered


def test_the_tokenizer_files_are_the_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ECHO_MODEL_DIR)
    text = "".join(map(chr, range(0x20, 0x3FF))) + "\n\t\0世界😀<|im_end|>x<|endoftext|>"
    assert tokenizer.encode(text) == encode(text)
    assert tokenizer.decode(encode(text)) == decode(encode(text)) == text


@pytest.mark.parametrize("stop", [(), ("lt",)])
async def test_it_goes_on_with_an_answer_that_another_began(stop: tuple[str, ...]) -> None:
    sampling = Sampling(64, stop=stop, logprobs=1)
    asked = ids_request(turn("zwölf Maß, halt 世界"), session="s", sampling=sampling)
    whole = await run(EchoEngine(chunk_tokens=1), asked)
    ids = [i for delta in whole for i in delta.ids]
    prompt = cast(IdsPrompt, asked.prompt)
    for k in range(1, len(ids) + 1):
        told = "".join(delta.text for delta in whole[:k])
        begun = replace(
            prompt,
            delta=prompt.delta + pack(ids[:k]),
            num_tokens=prompt.num_tokens + k,
            generated=Generated(k, len(told)),
        )
        rest = await run(EchoEngine(), replace(asked, prompt=begun))
        assert [i for delta in rest for i in delta.ids] == ids[k:]
        assert told + "".join(delta.text for delta in rest) == "".join(delta.text for delta in whole)
        assert [p for delta in rest for p in delta.logprobs] == [p for delta in whole for p in delta.logprobs][k:]
        assert (rest[-1].finish, rest[-1].stop) == (whole[-1].finish, whole[-1].stop)
        assert rest[-1].usage == whole[-1].usage


async def test_it_refuses_the_beginning_of_another_answer() -> None:
    asked = ids_request(turn("yes"))
    prompt = cast(IdsPrompt, asked.prompt)
    begun = replace(
        prompt, delta=prompt.delta + pack(encode("no")), num_tokens=prompt.num_tokens + 2, generated=Generated(2, 2)
    )
    with pytest.raises(RequestRefused):
        await run(EchoEngine(), replace(asked, prompt=begun))
