"""The log is in nobody's way."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.logs import LossyLines


def test_lines_that_nobody_takes_are_counted_and_raise_nothing(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    taken = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    line = os.dup(full)
    log = LossyLines(line)()
    log.info("one")
    log.error("two")
    os.dup2(taken, line)
    log.info("three \ud800")
    log.info("four")
    for descriptor in (full, taken, line):
        os.close(descriptor)
    assert (tmp_path / "log").read_text() == "2 lines of this log were lost\nthree \\ud800\nfour\n"
