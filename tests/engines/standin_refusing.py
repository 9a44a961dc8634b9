"""The stand-in core that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.local.process import Loaded, run
from tests.engines import standin_core


def load(folder: Path, options: dict[str, Any]) -> Loaded:
    return standin_core.load(folder, options | {"fail": True})


if __name__ == "__main__":
    run(load)
