"""How the gateway's process starts and ends, shown on a small application of its own."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APP = """
import asyncio, sys
from gateway.commands.failure import CommandFailed
from gateway.commands.listening import listen, run_until_signal
from starlette.applications import Starlette
from contextlib import asynccontextmanager

start_fails, stop_s = sys.argv[1] == "fails", float(sys.argv[2])

@asynccontextmanager
async def lifespan(app):
    if start_fails:
        raise RuntimeError("no such luck")
    yield
    print("stopping", app.state.stopping, flush=True)
    await asyncio.sleep(stop_s)
    print("stopped", flush=True)

app = Starlette(lifespan=lifespan)
app.state.stopping = False
try:
    with listen("127.0.0.1", 0) as listener:
        run_until_signal(app, listener, grace_s=1.0, on_ready=lambda: print("ready", flush=True))
except CommandFailed as failure:
    sys.exit(int(failure.code))
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", APP, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_the_lifespan_and_the_process_with_0(number: signal.Signals) -> None:
    with started("works", "0.1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "stopping True\nstopped\n"
        assert process.wait() == 0


def test_a_second_signal_ends_the_process_at_once() -> None:
    with started("works", "60") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping True\n"
        at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - at < 10


def test_an_application_that_does_not_start_ends_with_a_code_of_its_own() -> None:
    with started("fails", "0") as process:
        assert process.wait() == 9
