"""Runs the embedded engine as a child process: starts it, waits until it answers, starts it again when it dies.

The child watches its standard input: when the gateway dies, even by kill -9, the pipe closes and the engine ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson

START_TIMEOUT_S = 600.0  # a large model on a slow disk
BACKOFF_S = (0.2, 1.0, 3.0, 10.0)
STOP_S = 5.0


class EngineStartFailed(Exception):
    """The embedded engine did not come up; the message holds its last lines."""


@dataclass(slots=True)
class EmbeddedEngine:
    url: str
    pid: int


@asynccontextmanager
async def embedded_engine(
    arguments: Sequence[str],
    *,
    on_start: Callable[[EmbeddedEngine], Awaitable[None]],
    report: Callable[[str], None],
) -> AsyncIterator[None]:
    """`turnkeep engine ARGUMENTS` as a supervised child while the context is open.

    `on_start` is awaited each time the child is up, with its address: a restarted engine has another port.
    """
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(_keep_running(arguments, on_start, report, first), name="embedded-engine")
    try:
        await asyncio.wait({first, task}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _keep_running(
    arguments: Sequence[str],
    on_start: Callable[[EmbeddedEngine], Awaitable[None]],
    report: Callable[[str], None],
    first: asyncio.Future[None],
) -> None:
    failures = 0
    while True:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.cli",
            "engine",
            "--exit-with-parent",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            url = await _ready_line(child, report)
            if url is not None:
                failures = 0
                await on_start(EmbeddedEngine(url, child.pid))
                if not first.done():
                    first.set_result(None)
                await _drain(child, report)
            code = await child.wait()
        finally:
            await _stop(child)
        if not first.done():
            raise EngineStartFailed(f"the embedded engine ended with code {code} before it answered; see above")
        pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
        failures += 1
        report(f"the embedded engine ended with code {code}; starting it again in {pause:g} s")
        await asyncio.sleep(pause)


async def _ready_line(child: asyncio.subprocess.Process, report: Callable[[str], None]) -> str | None:
    """The child's address from its one JSON ready line, or None when it ended first."""
    assert child.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        while line := await child.stdout.readline():
            if line.startswith(b"{"):
                return str(orjson.loads(line)["url"])
            report(line.decode(errors="replace").rstrip())
    return None


async def _drain(child: asyncio.subprocess.Process, report: Callable[[str], None]) -> None:
    assert child.stdout is not None
    while line := await child.stdout.readline():
        report(line.decode(errors="replace").rstrip())


async def _stop(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        return
    child.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
