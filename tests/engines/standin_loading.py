"""The stand-in core that never finishes loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.local.process import Loaded, run
from tests.engines import standin_core


def load(folder: Path, options: dict[str, Any]) -> Loaded:
    return standin_core.load(folder, options | {"load_s": 3600.0})


if __name__ == "__main__":
    run(load)
