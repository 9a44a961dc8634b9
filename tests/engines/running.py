"""A running engine for tests: the real launch in a process of its own, on a free port."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from engines.contract import Base, Sampling, Shift
from engines.local.checks import u32_bytes
from engines.local.interpreter import child_environment
from engines.local.wire import CONTENT_TYPE, WireRequest, encode_generate

READY_S = 200.0  # loading takes 3 s, on loaded cores a minute; one that stood still for 300 s was seen once
STANDIN = "tests.engines.standin_core"
CODE = """
import json, sys
from engines.local.launch import EngineOptions, run_engine
options, child = json.loads(sys.argv[1]), json.loads(sys.argv[2])
sys.exit(run_engine(EngineOptions(**options), child=child))
"""


@dataclass
class RunningEngine:
    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    client: httpx.Client

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def body(
        self,
        ids: list[int],
        *,
        session: str | None = None,
        base: Base | None = None,
        salt: str = "",
        priority: int = 0,
        shift: Shift | None = None,
        **sampling: Any,
    ) -> bytes:
        asked = Sampling(**({"max_tokens": 4, "temperature": 0.0} | sampling))
        delta = u32_bytes(ids)
        return encode_generate(
            WireRequest("r", self.ready["model"], delta, asked, session, base, salt, priority, shift)
        )

    def generate(self, ids: list[int], **more: Any) -> tuple[int, list[dict[str, Any]]]:
        """Status and events of one request; a refusal is its one event."""
        answer = self.client.post(
            "/turnkeep/v1/generate", content=self.body(ids, **more), headers={"content-type": CONTENT_TYPE}
        )
        if answer.status_code != 200:
            return answer.status_code, [answer.json()]
        return 200, list(events(answer.text))


def events(stream: str) -> Iterator[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    yield from map(json.loads, lines[:-1])


def start_command(options: dict[str, Any], child: str | None) -> list[str]:
    return [sys.executable, "-c", CODE, json.dumps({"port": 0} | options), json.dumps(child)]


def start(options: dict[str, Any], child: str | None, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        start_command(options, child),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1"),
        **more,
    )


def stacks_of(process: subprocess.Popen[bytes]) -> None:
    """Each of its processes ends, and writes the stacks of its threads to standard error."""
    front = psutil.Process(process.pid)
    for one in (*front.children(recursive=True), front):
        one.send_signal(signal.SIGABRT)
    process.wait(20)


@contextmanager
def running_engine(options: dict[str, Any], child: str | None = None) -> Iterator[RunningEngine]:
    with start(options, child) as process:
        try:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], READY_S)[0]:
                stacks_of(process)
                raise AssertionError(f"the engine is not ready within {READY_S} s; where it stands is told above")
            line = process.stdout.readline()
            assert line, f"the engine ended with code {process.wait()} before it was ready"
            ready = json.loads(line)
            with httpx.Client(base_url=ready["url"], timeout=60) as client:
                yield RunningEngine(process, ready, client)
        finally:
            process.terminate()
            process.wait(20)
