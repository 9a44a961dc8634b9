"""Processes under measurement: started, heard until they are ready, their CPU time and memory read, ended.

CPU seconds are user and system time of a process and all below it; the kernel counts them in steps of 10 ms.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
START_S = 120.0


class NotStarted(Exception):
    """The process ended, or did not say in time that it is ready."""


@dataclass(frozen=True, slots=True)
class Running:
    process: psutil.Process
    said: str  # standard output until it was ready

    def cpu_s(self) -> float:
        total = 0.0
        for member in [self.process, *self.process.children(recursive=True)]:
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total

    def rss_mib(self) -> float:
        """Resident memory of the process and all below it, MiB."""
        return sum(p.memory_info().rss for p in [self.process, *self.process.children(recursive=True)]) / (1 << 20)


@contextmanager
def started(
    command: Sequence[str], *, folder: Path, ready: str, environ: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run `command` in `folder` until the context ends; entered once a line of its output matches `ready`.

    Its standard input closes when this process ends, however that happens: an engine started with
    `--exit-with-parent` leaves no orphan. SIGTERM ends this process by SystemExit, so that the child goes with it.
    """
    unwind_on_sigterm()
    given = {name: value for name, value in os.environ.items() if not name.startswith("TURNKEEP_")}
    given |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(environ or {})}
    name = Path(command[0]).name
    output = folder / f"{name}-{time.monotonic_ns()}.log"
    with output.open("wb") as sink:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=given,
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            said = _heard(child, output, re.compile(ready))
            yield Running(psutil.Process(child.pid), said)
        finally:
            assert child.stdin is not None
            child.stdin.close()
            _end(child)


def unwind_on_sigterm() -> None:
    """Only the main thread may say so: where children are started in others, it is said before, there."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _unwind)


def _unwind(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _heard(child: subprocess.Popen[bytes], output: Path, ready: re.Pattern[str]) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        said = output.read_text(errors="replace")
        if ready.search(said):
            return said
        if child.poll() is not None:
            raise NotStarted(f"{child.args!r:.200} ended with {child.returncode}: {said[-1000:]}")
        time.sleep(0.05)
    raise NotStarted(f"{child.args!r:.200} was not ready after {START_S:.0f} s: {output.read_text()[-1000:]}")


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(timeout=8)
        except subprocess.TimeoutExpired:
            continue
        break
    child.wait()


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
