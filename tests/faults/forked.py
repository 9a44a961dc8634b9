"""Processes that begin as copies of one which has imported the gateway: its seconds of imports are paid once a worker.

What is copied has run nothing but imports. Each copy is a process of its own, with its own pid, and is killed as one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

IMPORTED = ("gateway.app", "gateway.cli", "gateway.commands.serve", "tests.faults.slow_echo", "tests.faults.told_echo")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(IMPORTED))


class Forked:
    """A running `python -m MODULE ARGUMENTS...`; its output goes to `log`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path, log: Path) -> None:
        python, dash_m, *words = command
        assert (python, dash_m) == (sys.executable, "-m"), command
        self._process = _context.Process(target=_run, args=(words, dict(environ), folder, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; -N where signal N ended it."""
        return self._process.exitcode

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run(words: list[str], environ: dict[str, str], folder: Path, log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
