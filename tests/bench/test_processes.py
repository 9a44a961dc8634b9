"""A bench that is ended takes what it started with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engines.local.interpreter import ROOT, child_environment

BENCH = """
import asyncio, signal, sys, uvloop
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
from contextlib import ExitStack
from pathlib import Path
from bench.processes import started, unwind_on_sigterm

async def measure(command):
    with ExitStack() as stack:
        child = started(command, folder=Path(sys.argv[1]), ready="up")
        if sys.argv[2] == "thread":
            unwind_on_sigterm()
            running = await asyncio.to_thread(stack.enter_context, child)
        else:
            running = stack.enter_context(child)
        print(running.process.pid, flush=True)
        await asyncio.sleep(60)

uvloop.run(measure([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("started_in", ["main", "thread"])
def test_a_bench_that_is_ended_leaves_no_orphan(number: signal.Signals, started_in: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCH, str(tmp_path), started_in]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=child_environment(), cwd=ROOT
    ) as bench:
        assert bench.stdout is not None
        child = int(bench.stdout.readline())
        bench.send_signal(number)
        assert bench.wait(timeout=30) != 0
    assert not psutil.pid_exists(child)
