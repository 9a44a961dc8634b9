"""The engine's HTTP front, over a stand-in core in a real model process: every door of docs/engine-wire.md."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from engines.contract import EMPTY_DIGEST, Base, Grammar, Sampling, chain_digest
from engines.local.checks import u32_bytes
from engines.local.wire import CONTENT_TYPE, WireRequest, encode_generate
from tests.engines.running import STANDIN, RunningEngine, events, running_engine
from tests.engines.standin_core import FAIL, PRIORITY, SCORE_BYTES, VOCAB, WINDOW


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("template")
    with running_engine({"model": str(folder), "served_name": "standin", "max_waiting": 4}, STANDIN) as running:
        yield running


def digest_after(*parts: list[int], start: bytes = EMPTY_DIGEST) -> bytes:
    for ids in parts:
        start = chain_digest(start, u32_bytes(ids))
    return start


def health(engine: RunningEngine) -> dict[str, Any]:
    found: dict[str, Any] = engine.client.get("/health").json()
    return found


def wait_until(engine: RunningEngine, **load: int) -> None:
    until_s = time.monotonic() + 5
    while health(engine)["load"] | load != health(engine)["load"]:
        assert time.monotonic() < until_s, health(engine)
        time.sleep(0.02)


def test_an_answer_streams_from_started_to_last(engine: RunningEngine) -> None:
    status, (started, *deltas) = engine.generate([5, 6, 7], logprobs=1)
    assert status == 200
    assert started == {"prompt_tokens": 3, "cached_tokens": 0, "queue_s": 0.0}
    assert [delta["ids"] for delta in deltas] == [[5], [6], [7], [8]]
    assert deltas[0]["logprobs"] == [{"id": 5, "text": " 5", "logprob": -0.25, "top": [[5, " 5", -0.25]]}]
    assert [delta.get("finish") for delta in deltas] == [None, None, None, "length"]
    assert deltas[-1]["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 4}
    assert deltas[-1]["stop"] is None


def test_priority_reaches_the_core_by_both_doors(engine: RunningEngine) -> None:
    _, got = engine.generate([PRIORITY], priority=7, max_tokens=1)
    assert got[-1]["ids"] == [7]
    fields = {"model": "standin", "prompt": [PRIORITY], "max_tokens": 1, "priority": 9, "return_token_ids": True}
    whole = engine.client.post("/v1/completions", json=fields).json()
    assert whole["choices"][0]["token_ids"] == [9]


def test_scores_come_as_they_left_the_core_and_only_by_their_own_door(engine: RunningEngine) -> None:
    def ask(path: str, first: int = 5, **fields: int) -> httpx.Response:
        sampling = Sampling(max_tokens=2)
        request = WireRequest("s", "standin", u32_bytes([first, 6, 7]), sampling, **fields)  # type: ignore[arg-type]
        headers = {"content-type": CONTENT_TYPE}
        return engine.client.post(path, content=encode_generate(request), headers=headers)

    got = ask("/turnkeep/v1/score", score_from=1, min_bits=16, system_tokens=2, recent_from=3)
    assert (got.status_code, struct.unpack("<4f", got.content[:16])) == (200, (1.0, 16.0, 2.0, 3.0))
    assert len(got.content) == 16 + SCORE_BYTES
    assert ask("/turnkeep/v1/score").json()["error"]["param"] == "score_from"
    assert ask("/turnkeep/v1/generate", score_from=1).json()["error"]["param"] == "score_from"
    failed = ask("/turnkeep/v1/score", FAIL, score_from=1)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")


def test_a_turn_sends_only_its_delta_and_an_unknown_base_asks_for_the_whole(engine: RunningEngine) -> None:
    first, answer, second = [10, 11], [10, 11, 12, 13], [20]
    assert engine.generate(first, session="s", salt="t")[0] == 200
    base = Base(6, digest_after(first, answer))
    status, got = engine.generate(second, session="s", salt="t", base=base)
    assert (status, got[0]["prompt_tokens"], got[0]["cached_tokens"]) == (200, 7, 6)
    earlier = Base(2, digest_after(first))
    assert engine.generate([9], session="s", salt="t", base=earlier)[1][0]["prompt_tokens"] == 3
    for wrong in (Base(6, digest_after(first)), Base(5, base.digest), base):  # `base` itself was cut off by `earlier`
        status, got = engine.generate(second, session="s", salt="t", base=wrong)
        assert (status, got[0]["error"]["code"]) == (409, "unknown_base")
    assert engine.generate(second, session="s", salt="other", base=earlier)[0] == 409
    assert engine.generate(first + answer + second, session="s", salt="t")[0] == 200


def test_a_forgotten_session_is_gone_and_its_blocks_are_told(engine: RunningEngine) -> None:
    ids = list(range(40))
    for salt in ("a", "b"):
        engine.generate(ids, session="dir/ä?", salt=salt)
    listed = [
        entry for entry in engine.client.get("/turnkeep/v1/sessions").json()["sessions"] if "ä" in entry["session"]
    ]
    assert [(entry["tokens"], entry["blocks"]) for entry in listed] == [(44, 2), (44, 2)]
    assert all(entry["last_used_s"] >= 0 for entry in listed)
    assert len({entry["bytes"] / entry["blocks"] for entry in listed}) == 1
    assert all(entry["bytes"] > 0 for entry in listed)
    gone = engine.client.delete("/turnkeep/v1/sessions/dir%2F%C3%A4%3F", params={"salt": "a"})
    assert gone.json() == {"blocks_freed": 2, "tiers": {"device": 2, "host": 0, "disk": 0}}
    base = Base(44, digest_after(ids, [0, 1, 2, 3]))
    assert engine.generate([1], session="dir/ä?", salt="a", base=base)[0] == 409
    assert engine.generate([1], session="dir/ä?", salt="b", base=base)[0] == 200
    assert engine.client.delete("/turnkeep/v1/sessions/dir%2F%C3%A4%3F").json()["blocks_freed"] == 3  # one turn more
    assert engine.client.delete("/turnkeep/v1/sessions/never").json()["blocks_freed"] == 0
    assert engine.client.delete("/turnkeep/v1/sessions/s", params={"salt": "a b"}).status_code == 400


def test_a_prompt_beyond_the_window_is_refused_with_the_numbers(engine: RunningEngine) -> None:
    status, (got,) = engine.generate([1] * WINDOW)
    error = got["error"]
    assert (status, error["code"], error["limit"], error["requested"]) == (
        400, "context_length_exceeded", WINDOW, WINDOW + 4,
    )  # fmt: skip


def test_what_the_core_refuses_is_a_status_and_names_the_field(engine: RunningEngine) -> None:
    status, (got,) = engine.generate([1], grammar=Grammar("lark", "x"))
    assert (status, got["error"]["code"], got["error"]["param"]) == (400, "invalid_request", "grammar")


def test_an_error_after_the_first_byte_is_an_event_and_batch_mates_do_not_notice(engine: RunningEngine) -> None:
    with ThreadPoolExecutor(2) as pool:
        mate = pool.submit(engine.generate, [50], max_tokens=300)
        failed = pool.submit(engine.generate, [FAIL])
    assert failed.result()[1][-1] == {"error": {"code": "engine_error", "message": "told to fail"}}
    made = [token for event in mate.result()[1] for token in event.get("ids", ())]
    assert made == [(50 + n) % VOCAB for n in range(300)]


def post(engine: RunningEngine, content: bytes, **headers: str) -> tuple[int, str]:
    headers = {"content-type": CONTENT_TYPE} | {name.replace("_", "-"): value for name, value in headers.items()}
    answer = engine.client.post("/turnkeep/v1/generate", content=content, headers=headers)
    return answer.status_code, answer.json()["error"]["code"]


def test_bodies_that_are_no_request_are_refused_before_the_engine(engine: RunningEngine) -> None:
    good = engine.body([1])
    assert post(engine, b"") == (400, "invalid_request")
    assert post(engine, good[:-1]) == (400, "invalid_request")
    assert post(engine, struct.pack("<I", 1 << 31) + b"{}") == (400, "invalid_request")
    assert post(engine, engine.body([VOCAB])) == (400, "invalid_request")
    assert post(engine, good.replace(b"standin", b"another")) == (404, "model_not_found")
    assert post(engine, good, content_type="application/json") == (415, "unsupported_media_type")
    assert post(engine, good, content_encoding="gzip") == (415, "unsupported_media_type")
    assert post(engine, b"\0" * (9 << 20)) == (413, "request_too_large")
    assert health(engine)["status"] == "ok"


def test_a_body_without_a_length_is_cut_at_the_limit(engine: RunningEngine) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"\0" * (1 << 20)

    answer = engine.client.post("/turnkeep/v1/generate", content=endless(), headers={"content-type": CONTENT_TYPE})
    assert answer.status_code == 413


def test_an_unknown_path_and_a_wrong_method_have_the_same_error_shape(engine: RunningEngine) -> None:
    assert engine.client.get("/nothing").json() == {"error": {"code": "not_found", "message": "Not Found"}}
    assert engine.client.get("/turnkeep/v1/generate").json()["error"]["code"] == "method_not_allowed"
    for name in ("model.safetensors", "..%2Ftokenizer.json", "nothing.json"):
        assert engine.client.get(f"/turnkeep/v1/tokenizer/{name}").status_code == 404


def test_models_capabilities_and_files_say_what_is_served(engine: RunningEngine) -> None:
    (model,) = engine.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("standin", WINDOW)
    can = engine.client.get("/turnkeep/v1/capabilities").json()
    assert (can["kind"], can["window"], can["takes_delta"], can["epoch"]) == (
        "turnkeep",
        WINDOW,
        True,
        engine.ready["epoch"],
    )
    assert "temperature" in can["sampling"]
    assert can["grammars"] == ["json_object", "json_schema", "lark", "regex"]
    assert engine.client.get("/turnkeep/v1/tokenizer/chat_template.jinja").text == "template"


def test_health_tells_pool_load_and_epoch(engine: RunningEngine) -> None:
    wait_until(engine, running=0, waiting=0)
    found = health(engine)
    assert found["pool"] == {
        "total": 10,
        "free": 10,
        "cached": 0,
        "used": 0,
        "bytes": 0,
        "sealed_bytes": 0,
        "sealed_units": {},
    }
    assert (found["status"], found["pool_ok"], found["block_size"]) == ("ok", True, 16)
    assert found["epoch"] == engine.ready["epoch"]


def test_metrics_count_what_was_served(engine: RunningEngine) -> None:
    def counted(name: str) -> float:
        text = engine.client.get("/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    before = counted('turnkeep_engine_requests_total{end="finished"}')
    tokens = counted('turnkeep_engine_tokens_total{kind="output"}')
    engine.generate([1, 2])
    engine.generate([1] * WINDOW)
    assert counted('turnkeep_engine_requests_total{end="finished"}') == before + 1
    assert counted('turnkeep_engine_tokens_total{kind="output"}') == tokens + 4
    assert counted('turnkeep_engine_requests_total{end="context_length_exceeded"}') >= 1
    assert counted("turnkeep_engine_blocks") == 10


def raw_request(engine: RunningEngine, body: bytes) -> socket.socket:
    host, port = engine.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /turnkeep/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-type: {CONTENT_TYPE}\r\n"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    """Steps of 50 ms, a queue of two."""
    options = {"model": str(tmp_path_factory.mktemp("model")), "served_name": "standin", "max_waiting": 2}
    with running_engine(options, "tests.engines.standin_slow") as running:
        yield running


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_is_cancelled_long_before_its_answer_would_end(
    slow: RunningEngine, streaming: bool
) -> None:
    connection = raw_request(slow, slow.body([1], max_tokens=4000))
    if streaming:
        wait_until(slow, running=1)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()  # RST
    left_s = time.monotonic()
    wait_until(slow, running=0, waiting=0)
    assert time.monotonic() - left_s < 10, "the answer takes 200 s"


def test_a_client_of_completions_that_leaves_is_cancelled_too(slow: RunningEngine) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    body = json.dumps({"model": "standin", "prompt": [1], "max_tokens": 4000}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(slow, running=1)
    left_s = time.monotonic()
    wait_until(slow, running=0)
    assert time.monotonic() - left_s < 10, "the answer takes 200 s"


def test_a_full_queue_is_503_with_retry_after_at_once(slow: RunningEngine) -> None:
    held = [raw_request(slow, slow.body([1], max_tokens=4000)) for _ in range(12)]
    try:
        refused = [head for connection in held if b" 503 " in (head := connection.recv(300)).split(b"\r\n")[0]]
        assert refused
        assert all(b"retry-after: 1" in head and b'"overloaded"' in head for head in refused)
    finally:
        for connection in held:
            connection.close()
    wait_until(slow, running=0, waiting=0)
    assert slow.generate([1])[0] == 200


# ------------------------------------------------------------------ /v1/completions
def complete(engine: RunningEngine, **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = engine.client.post(
        "/v1/completions", json={"model": "standin", "prompt": [5, 6], "max_tokens": 3} | fields
    )
    return answer.status_code, answer.json()


def test_a_completion_of_ids_has_openais_shape(engine: RunningEngine) -> None:
    status, got = complete(engine, logprobs=1, return_token_ids=True, user="u")
    assert status == 200
    assert got["object"] == "text_completion"
    assert got["choices"] == [
        {
            "index": 0,
            "text": " 5 6 7",
            "finish_reason": "length",
            "logprobs": {
                "tokens": [" 5", " 6", " 7"],
                "token_logprobs": [-0.25] * 3,
                "top_logprobs": [{" 5": -0.25}, {" 6": -0.25}, {" 7": -0.25}],
                "text_offset": [0, 2, 4],
            },
            "token_ids": [5, 6, 7],
            "prompt_token_ids": [5, 6],
        }
    ]
    assert got["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_several_prompts_are_several_choices(engine: RunningEngine) -> None:
    _, got = complete(engine, prompt=[[5], [100], [7, 8]])
    assert [(choice["index"], choice["text"]) for choice in got["choices"]] == [
        (0, " 5 6 7"), (1, " 100 101 102"), (2, " 7 8 9"),
    ]  # fmt: skip
    assert got["usage"]["total_tokens"] == 4 + 9


@pytest.mark.parametrize("prompt", [[5], [[5], [100]]])
def test_a_streamed_completion_adds_up_to_the_whole_one(engine: RunningEngine, prompt: list[Any]) -> None:
    _, whole = complete(engine, prompt=prompt)
    fields = {"model": "standin", "prompt": prompt, "max_tokens": 3, "stream": True}
    answer = engine.client.post("/v1/completions", json=fields | {"stream_options": {"include_usage": True}})
    *chunks, last = events(answer.text)
    for at, choice in enumerate(whole["choices"]):
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == at]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None, None, "length"]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 2}), ("best_of", {"best_of": 3}), ("echo", {"echo": True}), ("suffix", {"suffix": "x"}),
        ("prompt", {"prompt": ""}), ("prompt", {"prompt": []}), ("prompt", {"prompt": [1, True]}),
        ("prompt", {"prompt": [[]]}), ("prompt", {"prompt": [-1]}), ("prompt", {"prompt": [VOCAB]}),
        ("prompt", {"prompt": [[1]] * 33}), ("prompt", {"prompt": 5}), ("prompt", {"prompt": [[1], 2]}),
        ("max_tokens", {"max_tokens": 0}), ("max_tokens", {"max_tokens": True}), ("logprobs", {"logprobs": 999}),
        ("temperature", {"temperature": -1}), ("stream", {"stream": "yes"}), ("surprise", {"surprise": 1}),
        ("response_format", {"response_format": {"type": "xml"}}), ("model", {"model": None}),
        ("skip_special_tokens", {"skip_special_tokens": False}), ("cache_salt", {"cache_salt": "ä"}),
    ],
)  # fmt: skip
def test_what_a_completion_cannot_do_is_refused_by_name(
    engine: RunningEngine, param: str, fields: dict[str, Any]
) -> None:
    status, got = complete(engine, **fields)
    assert (status, got["error"]["param"]) == (400, param)


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"temperature": NaN}', b'{"a": "\\ud800"}', b"\xff", b"[" * 50_000])
def test_a_body_that_is_no_json_object_is_400(engine: RunningEngine, raw: bytes) -> None:
    answer = engine.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_a_failed_prompt_fails_the_whole_completion_and_cancels_the_others(engine: RunningEngine) -> None:
    status, got = complete(engine, prompt=[[5], [FAIL]], max_tokens=2000)
    assert (status, got["error"]["code"]) == (500, "engine_error")
    wait_until(engine, running=0, waiting=0)
