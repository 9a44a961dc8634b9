"""The embedded engine's model as a folder on this machine, fetched and converted where that must be.

The work is done in a child process: the gateway itself never imports torch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.settings import Settings

ECHO = "echo"  # the engine that repeats what it is told: no weights, no torch
NEEDED = ("torch", "safetensors", "numpy")


def ensure_model(settings: Settings, *, progress: Callable[[str], None]) -> Settings:
    """The same settings with `model_dir` set, and `model` as requests name it. Raises CommandFailed."""
    if settings.model == ECHO:
        return settings
    need_engine_extra()
    wanted = str(settings.model_dir or settings.model)
    progress(f"model {wanted}")
    child = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "models", "path", wanted], stdout=subprocess.PIPE, text=True, check=False
    )
    if child.returncode:
        raise CommandFailed(ExitCode.MODEL, "There is no model for the embedded engine; the lines above say why.")
    given = Path(settings.model).expanduser()
    name = given.resolve().name if given.is_dir() else settings.model
    return settings.model_copy(update={"model": name, "model_dir": Path(child.stdout.strip())})


def need_engine_extra() -> None:
    """Raises CommandFailed where the packages of the embedded engine are not installed."""
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise CommandFailed(
            ExitCode.MODEL,
            f"The embedded engine needs packages that are not installed: {', '.join(missing)}. "
            "Install turnkeep[engine] (the README says which torch fits this machine), or run in front of an engine "
            "that runs elsewhere: turnkeep serve --upstream http://HOST:8000",
        )
