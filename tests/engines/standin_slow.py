"""The stand-in core with steps of 50 ms: time enough to leave, to fill the queue, to die in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.local.process import Loaded, run
from tests.engines import standin_core


def load(folder: Path, options: dict[str, Any]) -> Loaded:
    return standin_core.load(folder, options | {"step_s": 0.05})


if __name__ == "__main__":
    run(load)
