"""EchoEngine behind the engine's own front, in this process: what TurnkeepEngine is tested against."""

from __future__ import annotations

import time

from starlette.types import ASGIApp

from engines.echo import ECHO_MODEL_DIR, EchoEngine
from engines.local.backend import ModelInfo
from engines.local.in_process import InProcess
from engines.local.server import create_app as front

VOCAB = 259
GENERATE = "/turnkeep/v1/generate"


def create_app(engine: EchoEngine) -> ASGIApp:
    info = ModelInfo("echo", ECHO_MODEL_DIR, engine._window, VOCAB, engine.paths.block_size, "none", "none", "epoch")
    return front(InProcess(engine, info), clock=time.monotonic, now=time.time)
