"""How this Python starts a module of ours in a process of its own, wherever it is run from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # holds the package `engines`


def module_command(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def child_environment(**extra: str) -> dict[str, str]:
    """The environment with ROOT on the module path, so that a checkout works without being installed."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **extra}
