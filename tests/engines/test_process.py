"""Who dies takes along whom it must: no orphan, no silent half, no answer without an end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engines.local.interpreter import child_environment
from engines.local.wire import CONTENT_TYPE
from tests.engines.running import STANDIN, RunningEngine, events, running_engine, start, start_command
from tests.engines.standin_core import BREAK, DIE

SLOW = "tests.engines.standin_slow"


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"model": str(tmp_path), "served_name": "standin"}


def model_pid(engine: RunningEngine) -> int:
    (child,) = psutil.Process(engine.process.pid).children()
    return int(child.pid)


def wait_for(condition: Callable[[], bool], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_model_process_ends_every_answer_and_then_the_engine(options: dict[str, Any]) -> None:
    with running_engine(options, SLOW) as engine, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(engine.generate, [n], max_tokens=4000) for n in range(3)]
        wait_for(lambda: engine.client.get("/health").json()["load"]["running"] == 3, 5)
        os.kill(model_pid(engine), signal.SIGKILL)
        for answer in answers:
            status, got = answer.result(5)
            assert status == 200
            assert got[-1]["error"]["code"] == "engine_dead"
        assert engine.process.wait(10) == 3


@pytest.mark.parametrize(("first", "status"), [(DIE, 503), (BREAK, 503)])
def test_a_loop_that_fails_is_an_error_to_its_client_and_a_code_to_the_supervisor(
    options: dict[str, Any], first: int, status: int
) -> None:
    with running_engine(options, STANDIN) as engine:
        got = engine.client.post("/v1/completions", json={"model": "standin", "prompt": [first]})
        assert (got.status_code, got.json()["error"]["code"]) == (status, "engine_dead")
        assert engine.process.wait(10) == 3


def test_health_says_dead_until_the_engine_has_ended(options: dict[str, Any]) -> None:
    with running_engine(options, STANDIN) as engine:
        os.kill(model_pid(engine), signal.SIGKILL)
        wait_for(lambda: engine.client.get("/health").json()["status"] == "dead", 0.4)
        assert engine.generate([1])[0] == 503


@pytest.mark.parametrize("child", [STANDIN, SLOW])
def test_a_killed_front_leaves_no_model_process(options: dict[str, Any], child: str) -> None:
    with running_engine(options, child) as engine:
        model = model_pid(engine)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(engine.generate, [1], max_tokens=4000)
            wait_for(lambda: engine.client.get("/health").json()["load"]["running"] > 0 or running.done(), 5)
            engine.process.kill()
            wait_for(lambda: gone(model), 2)
            assert isinstance(running.exception(5), httpx.TransportError) or child == STANDIN


def test_the_engine_ends_when_its_parents_end_of_stdin_closes(options: dict[str, Any]) -> None:
    with running_engine(options | {"exit_with_parent": True}, SLOW) as engine:
        model = model_pid(engine)
        assert engine.process.stdin is not None
        engine.process.stdin.close()  # what the kernel does for a parent that was killed
        assert engine.process.wait(5) == 0
        wait_for(lambda: gone(model), 2)


PARENT = """
import subprocess, sys, time
subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
time.sleep(600)
"""


def test_a_parent_killed_by_9_takes_the_engine_along(options: dict[str, Any]) -> None:
    command = start_command(options | {"exit_with_parent": True}, SLOW)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, env=child_environment()
    ) as parent:
        assert parent.stdout is not None
        front = psutil.Process(json.loads(parent.stdout.readline())["pid"])
        (model,) = front.children()
        parent.kill()
        wait_for(lambda: gone(front.pid) and gone(model.pid), 5)


def test_without_exit_with_parent_a_closed_stdin_means_nothing(options: dict[str, Any]) -> None:
    with running_engine(options, STANDIN) as engine:
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        time.sleep(0.3)
        assert engine.generate([1])[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_by_signal_is_code_0_and_leaves_nothing(options: dict[str, Any], number: signal.Signals) -> None:
    with running_engine(options, STANDIN) as engine:
        model = model_pid(engine)
        engine.process.send_signal(number)
        assert engine.process.wait(10) == 0
        wait_for(lambda: gone(model), 2)


def test_a_stop_lets_a_short_answer_end(options: dict[str, Any]) -> None:
    with running_engine(options, SLOW) as engine, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engine.generate, [1], max_tokens=20)
        wait_for(lambda: engine.client.get("/health").json()["load"]["running"] == 1, 5)
        engine.process.terminate()
        assert answer.result(10)[1][-1]["finish"] == "length"
        assert engine.process.wait(10) == 0


def test_while_it_loads_the_engine_is_reachable_and_says_so(options: dict[str, Any]) -> None:
    with taken_port() as port:
        pass
    with start(options | {"port": port}, "tests.engines.standin_loading") as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(url), 20)
            got = httpx.get(f"{url}/health")
            assert (got.status_code, got.json()) == (503, {"status": "loading"})
            asked = httpx.post(f"{url}/v1/completions", json={"model": "standin", "prompt": [1]})
            assert (asked.status_code, asked.json()["error"]["code"]) == (503, "loading")
            assert "retry-after" in asked.headers
        finally:
            process.terminate()
            assert process.wait(20) == 0


@contextmanager
def taken_port() -> Iterator[int]:
    """A port that is taken while the context is open."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code > 0
    except httpx.TransportError:
        return False


def test_a_model_that_cannot_be_loaded_is_code_1_with_the_reason(options: dict[str, Any]) -> None:
    with start(options, "tests.engines.standin_refusing", stderr=subprocess.PIPE) as process:
        out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, b"")
    assert b"told not to load" in errors
    assert b"could not be loaded" in errors


def test_a_model_that_is_not_there_is_code_1_with_what_to_do() -> None:
    with start({"model": "no-such-model"}, None, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"give a folder" in errors
    assert b"Traceback" not in errors


def test_a_taken_port_is_code_1_with_a_sentence(options: dict[str, Any]) -> None:
    with taken_port() as port, start(options | {"port": port}, STANDIN, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"cannot listen" in errors


def test_an_idle_engine_uses_no_processor_time(options: dict[str, Any]) -> None:
    with running_engine(options, STANDIN) as engine:
        engine.generate([1])
        time.sleep(0.3)
        watched = [psutil.Process(engine.process.pid), psutil.Process(model_pid(engine))]
        before = sum(sum(one.cpu_times()[:2]) for one in watched)
        time.sleep(1)
        assert sum(sum(one.cpu_times()[:2]) for one in watched) - before <= 0.02


def test_a_client_that_does_not_read_is_cut_off_and_the_others_go_on(options: dict[str, Any]) -> None:
    """Log-probabilities make 4 MiB of unread events quickly; the front's buffer for one answer ends there."""
    with running_engine(options, "tests.engines.standin_wide") as engine:
        body = engine.body([1], max_tokens=4000, logprobs=1)
        with (
            httpx.Client(base_url=engine.url) as idle,
            idle.stream(
                "POST", "/turnkeep/v1/generate", content=body, headers={"content-type": CONTENT_TYPE}
            ) as unread,
        ):
            assert unread.status_code == 200
            front = psutil.Process(engine.process.pid)
            before = front.memory_info().rss
            wait_for(lambda: quiet(engine), 20)
            assert engine.generate([2])[0] == 200
            assert front.memory_info().rss - before < 40 << 20


def quiet(engine: RunningEngine) -> bool:
    """The model process has nothing to do any more."""
    model = psutil.Process(model_pid(engine))
    before = sum(model.cpu_times()[:2])
    time.sleep(0.3)
    return sum(model.cpu_times()[:2]) == before


@pytest.fixture
def echo() -> Any:
    with running_engine({"model": "echo"}) as engine:
        yield engine


def test_echo_serves_the_same_wire_without_torch_and_without_a_child(echo: RunningEngine) -> None:
    process = psutil.Process(echo.process.pid)
    assert process.children() == []
    assert not [entry for entry in process.memory_maps() if "torch" in entry.path]
    tokens = echo.client.post("/tokenize", json={"prompt": "<|im_start|>user\nhello<|im_end|>\n"}).json()["tokens"]
    status, (started, *deltas) = echo.generate(tokens, max_tokens=50)
    assert (status, started["prompt_tokens"]) == (200, len(tokens))
    assert "".join(delta["text"] for delta in deltas) == "hello"
    assert deltas[-1]["usage"]["prompt_tokens"] == len(tokens)
    spelled = echo.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert spelled == "<|im_start|>user\nhello<|im_end|>\n"
    assert echo.client.get("/turnkeep/v1/capabilities").json()["takes_delta"]
    assert echo.client.get("/turnkeep/v1/tokenizer/chat_template.jinja").status_code == 200
    assert process.memory_info().rss < 150 << 20


def test_echo_knows_bases_and_refuses_unknown_ones(echo: RunningEngine) -> None:
    from engines.contract import EMPTY_DIGEST, Base, chain_digest
    from engines.local.checks import u32_bytes

    first = echo.client.post("/tokenize", json={"prompt": "<|im_start|>user\na<|im_end|>\n"}).json()["tokens"]
    _, got = echo.generate(first, session="s", max_tokens=50)
    answer = [token for event in got for token in event.get("ids", ())]
    digest = chain_digest(chain_digest(EMPTY_DIGEST, u32_bytes(first)), u32_bytes(answer))
    base = Base(len(first) + len(answer), digest)
    status, got = echo.generate(first, session="s", base=base, max_tokens=50)
    assert (status, got[-1]["usage"]["prompt_tokens"]) == (200, base.length + len(first))
    assert echo.generate(first, session="s", base=Base(base.length, EMPTY_DIGEST))[0] == 409


def test_a_streamed_completion_of_text_works_on_echo(echo: RunningEngine) -> None:
    fields = {"model": "echo", "prompt": "<|im_start|>user\nhi there<|im_end|>\n", "stream": True, "max_tokens": 50}
    answer = echo.client.post("/v1/completions", json=fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in events(answer.text)) == "hi there"


def test_threads_of_the_model_process_sleep_between_operations(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with running_engine(options, STANDIN) as engine:
        assert psutil.Process(model_pid(engine)).environ()["OMP_WAIT_POLICY"] == "passive"
