"""How this Python starts a module of ours in a process of its own, wherever it is run from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]  # holds the package `engines`


def module_command(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def child_environment(**extra: str) -> dict[str, str]:
    """The environment with ROOT on the module path, so that a checkout works without being installed.

    Unless it says otherwise, OpenMP's threads sleep while they wait for each other. Spinning gains nothing on an idle
    machine and loses everything on a shared one: 2 threads beside other work decoded a token in 920 ms spinning, in
    143 ms sleeping (SmolLM2-135M, float32, 2 cores).
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": path, **extra}
