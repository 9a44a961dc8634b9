"""The stand-in core with 20 kB of log-probabilities for every token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.contract import TokenLogprob
from engines.local.process import Loaded, run
from tests.engines import standin_core


class WideCore(standin_core.StandinCore):
    def step(self) -> list[standin_core.Output]:
        wide = TokenLogprob(1, "x" * 20_000, -1.0)
        return [replace(output, logprobs=[wide]) if output.logprobs else output for output in super().step()]


def load(folder: Path, options: dict[str, Any]) -> Loaded:
    return replace(standin_core.load(folder, options), core=WideCore(0.0005))


if __name__ == "__main__":
    run(load)
