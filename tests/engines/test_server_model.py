"""The whole engine on the real model: front, model process, core. What only they show together."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engines.contract import EMPTY_DIGEST, Base, Grammar, Shift, chain_digest
from engines.local.checks import u32_bytes
from engines.local.wire import CONTENT_TYPE
from tests.engines.running import RunningEngine, events, running_engine

pytestmark = pytest.mark.model
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
OPTIONS = {"served_name": "small", "pool_bytes": 256 << 20, "threads": 1, "max_batch_tokens": 128}


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[RunningEngine]:
    with running_engine(OPTIONS | {"model": str(model_dir)}) as running:
        yield running


@pytest.fixture(autouse=True)
def balanced(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing runs, no block is in use, and the books balance."""
    yield
    if "engine" in request.fixturenames:
        engine: RunningEngine = request.getfixturevalue("engine")
        until_s = time.monotonic() + 10
        while (found := health(engine))["load"] != {"running": 0, "waiting": 0} or found["pool"]["used"]:
            assert time.monotonic() < until_s, found
            time.sleep(0.05)
        assert found["pool_ok"]
        assert found["pool"]["free"] + found["pool"]["cached"] == found["pool"]["total"]


def health(engine: RunningEngine) -> dict[str, Any]:
    found: dict[str, Any] = engine.client.get("/health").json()
    return found


def ids_of(engine: RunningEngine, text: str) -> list[int]:
    tokens: list[int] = engine.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def answer_of(got: list[dict[str, Any]]) -> list[int]:
    return [token for event in got for token in event.get("ids", ())]


def test_it_answers_streams_and_tells_the_same_in_ids_and_text(engine: RunningEngine) -> None:
    asked = ids_of(engine, CHAT.format("What is the capital of France?"))
    status, got = engine.generate(asked, max_tokens=20)
    text = "".join(event.get("text", "") for event in got)
    assert status == 200
    assert "Paris" in text
    spelled = engine.client.post("/detokenize", json={"tokens": answer_of(got)}).json()["prompt"]
    assert spelled.removesuffix("<|im_end|>") == text
    assert got[-1]["usage"]["output_tokens"] == len(answer_of(got))


def test_completions_of_text_and_of_ids_agree(engine: RunningEngine) -> None:
    text = CHAT.format("Count to five.")
    fields = {"model": "small", "max_tokens": 12, "temperature": 0}
    whole = [
        engine.client.post("/v1/completions", json=fields | {"prompt": prompt}).json()["choices"][0]["text"]
        for prompt in (text, ids_of(engine, text))
    ]
    streamed = engine.client.post("/v1/completions", json=fields | {"prompt": text, "stream": True})
    assert whole[0] == whole[1] == "".join(chunk["choices"][0]["text"] for chunk in events(streamed.text))


def test_a_second_turn_by_delta_equals_the_whole_prompt_and_reuses_all_but_its_news(engine: RunningEngine) -> None:
    first = ids_of(engine, CHAT.format("Name a fruit that is red and grows on trees in Europe."))
    _, got = engine.generate(first, session="s1", salt="a", max_tokens=16)
    answer = answer_of(got)
    digest = chain_digest(chain_digest(EMPTY_DIGEST, u32_bytes(first)), u32_bytes(answer))
    news = ids_of(engine, "<|im_end|>\n" + CHAT.format("And a yellow one?"))
    base = Base(len(first) + len(answer), digest)
    _, by_delta = engine.generate(news, session="s1", salt="a", base=base, max_tokens=16)
    _, whole = engine.generate(first + answer + news, session="s2", salt="b", max_tokens=16)
    assert answer_of(by_delta) == answer_of(whole)
    assert by_delta[0]["cached_tokens"] >= base.length - 1
    assert whole[0]["cached_tokens"] == 0  # another salt shares nothing


def test_kept_turns_after_a_cut_are_shifted_and_the_answer_says_that_it_is_approximate(engine: RunningEngine) -> None:
    head = ids_of(engine, "<|im_start|>system\nYou are brief.<|im_end|>\n")
    middle = ids_of(engine, CHAT.format("Tell me about the river Danube. " * 9) + "It is long.<|im_end|>\n")
    kept = ids_of(engine, CHAT.format("I live in Linz, in Austria. " * 12) + "Noted.<|im_end|>\n")
    summary = ids_of(engine, "<|im_start|>user\n[We spoke of the Danube.]<|im_end|>\n")
    asked = ids_of(engine, CHAT.format("In which country do I live?"))
    _, got = engine.generate(head + middle + kept, session="cut", salt="c", max_tokens=1)
    base = Base(
        len(head + middle + kept) + 1,
        chain_digest(chain_digest(EMPTY_DIGEST, u32_bytes(head + middle + kept)), u32_bytes(answer_of(got))),
    )
    shift = Shift(base, len(head + middle), len(head + summary), len(kept), 16)
    prompt = head + summary + kept + asked
    status, got = engine.generate(prompt, session="cut", salt="c", shift=shift, max_tokens=12)
    usage = got[-1]["usage"]
    assert status == 200
    assert (usage["approximate"], usage["shifted_tokens"]) == (True, len(kept) - 16)
    assert answer_of(got)
    _, exact = engine.generate(prompt, salt="c", max_tokens=12)
    assert "approximate" not in exact[-1]["usage"]
    assert exact[0]["cached_tokens"] <= len(head + summary) + 16


def test_it_says_whether_it_takes_a_shift(engine: RunningEngine) -> None:
    assert engine.client.get("/turnkeep/v1/capabilities").json()["takes_shift"] is True
    assert health(engine)["no_shift"] is None
    assert health(engine)["eviction"] == "cost_aware"


def test_it_says_how_it_attends_and_where_that_was_proven(engine: RunningEngine) -> None:
    assert health(engine)["attention"] == {"path": "torch", "why": "the device is cpu", "ran_on": ["cpu"]}


def test_an_unknown_base_is_409_and_the_whole_prompt_then_serves(engine: RunningEngine) -> None:
    ids = ids_of(engine, CHAT.format("Hello."))
    status, (got,) = engine.generate(ids, session="s3", base=Base(10, b"\1" * 32))
    assert (status, got["error"]["code"]) == (409, "unknown_base")
    assert engine.generate(ids, session="s3")[0] == 200


def test_delete_forgets_the_session_and_frees_its_blocks(engine: RunningEngine) -> None:
    ids = ids_of(engine, CHAT.format("Tell me about the river Danube, " * 12))
    engine.generate(ids, session="gone", salt="g", max_tokens=4)
    assert any(kept["session"] == "gone" for kept in engine.client.get("/turnkeep/v1/sessions").json()["sessions"])
    cached = health(engine)["pool"]["cached"]
    freed = engine.client.delete("/turnkeep/v1/sessions/gone").json()["blocks_freed"]
    assert freed >= len(ids) // 32
    assert all(kept["session"] != "gone" for kept in engine.client.get("/turnkeep/v1/sessions").json()["sessions"])
    until_s = time.monotonic() + 5
    while health(engine)["pool"]["cached"] > cached - freed:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    digest = chain_digest(EMPTY_DIGEST, u32_bytes(ids))
    assert engine.generate([1], session="gone", salt="g", base=Base(len(ids), digest))[0] == 409
    assert engine.generate(ids, session="new", salt="g", max_tokens=1)[1][0]["cached_tokens"] == 0


def test_a_client_that_leaves_frees_its_blocks_long_before_its_answer_would_end(engine: RunningEngine) -> None:
    body = engine.body(ids_of(engine, CHAT.format("Tell a very long story.")), max_tokens=2000, ignore_eos=True)
    headers = {"content-type": CONTENT_TYPE}
    with (
        httpx.Client(base_url=engine.url) as client,
        client.stream("POST", "/turnkeep/v1/generate", content=body, headers=headers) as answer,
    ):
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["prompt_tokens"]
    left_s = time.monotonic()
    while health(engine)["load"]["running"]:
        assert time.monotonic() - left_s < 10
        time.sleep(0.02)


def test_bad_requests_do_not_change_the_answers_of_their_batch_mates(engine: RunningEngine) -> None:
    asked = ids_of(engine, CHAT.format("Write one sentence about the sea."))
    alone = answer_of(engine.generate(asked, max_tokens=24, salt="x")[1])
    bad: list[dict[str, Any]] = [
        {"grammar": Grammar("regex", "(unclosed")},
        {"grammar": Grammar("json_schema", "{")},
        {"base": Base(3, b"\2" * 32), "session": "q"},
        {"max_tokens": 100_000},
    ]
    with ThreadPoolExecutor(5) as pool:
        mate = pool.submit(engine.generate, asked, max_tokens=24, salt="y")
        statuses = [pool.submit(engine.generate, asked, **more).result()[0] for more in bad]
    assert statuses == [400, 400, 409, 400]
    assert answer_of(mate.result()[1]) == alone


def test_a_schema_is_followed_by_the_real_model(engine: RunningEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    fields = {
        "model": "small",
        "prompt": CHAT.format("Describe a person as JSON with name and age."),
        "max_tokens": 80,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    }
    answer = engine.client.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["text"])) == {"name", "age"}


def test_penalties_biases_and_logprobs_work_together(engine: RunningEngine) -> None:
    asked = ids_of(engine, CHAT.format("Say hello."))
    plain = answer_of(engine.generate(asked, max_tokens=4)[1])
    shaped = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {plain[0]: -100.0}, "logprobs": 2}
    status, got = engine.generate(asked, max_tokens=4, **shaped)
    assert (status, got[-1].get("finish")) == (200, "length"), got
    assert plain[0] not in answer_of(got)
    assert len(got[1]["logprobs"][0]["top"]) == 2
    drawn = [answer_of(engine.generate(asked, max_tokens=8, temperature=1.0, top_p=0.9, seed=7)[1]) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_metrics_tell_the_core_counters(engine: RunningEngine) -> None:
    engine.generate(ids_of(engine, "one two three"))
    time.sleep(0.1)
    text = engine.client.get("/metrics").text
    for name in ("steps", "prefill_tokens", "decode_tokens", "cached_tokens", "preemptions", "evictions"):
        assert f"turnkeep_engine_{name}_total " in text


@pytest.mark.parametrize("victim", ["model", "front"])
def test_kill_9_of_either_process_leaves_no_orphan(model_dir: Path, victim: str) -> None:
    with running_engine(OPTIONS | {"model": str(model_dir), "pool_bytes": 64 << 20}) as engine:
        (model,) = psutil.Process(engine.process.pid).children()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(engine.generate, [1] * 50, max_tokens=1000, ignore_eos=True)
            until_s = time.monotonic() + 10
            while not health(engine)["load"]["running"]:
                assert time.monotonic() < until_s
                time.sleep(0.02)
            os.kill(model.pid if victim == "model" else engine.process.pid, signal.SIGKILL)
            if victim == "model":
                assert running.result(5)[1][-1]["error"]["code"] == "engine_dead"
            else:
                assert isinstance(running.exception(5), httpx.TransportError)
        code = engine.process.wait(10)
        assert code == (3 if victim == "model" else -signal.SIGKILL)
        psutil.wait_procs([model], timeout=3)
        assert not model.is_running() or model.status() == psutil.STATUS_ZOMBIE
