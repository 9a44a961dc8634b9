"""An engine process without a model: EchoEngine behind the engine's own HTTP front, at a pace that can be interrupted.

python -m tests.faults.slow_echo PORT TOKENS_PER_S
"""

from __future__ import annotations

import secrets
import sys
import time

import uvicorn

from engines.echo import ECHO_MODEL_DIR, EchoEngine
from engines.local.backend import ModelInfo
from engines.local.in_process import InProcess
from engines.local.server import create_app


def main(port: str, tokens_per_s: str) -> None:
    epoch = secrets.token_hex(8)  # as the real one: another life, another epoch
    engine = EchoEngine(epoch=epoch, tokens_per_s=float(tokens_per_s))
    info = ModelInfo("echo", ECHO_MODEL_DIR, 131_072, 259, 32, "none", "none", epoch)
    app = create_app(InProcess(engine, info), clock=time.monotonic, now=time.time)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", lifespan="off")


if __name__ == "__main__":
    main(*sys.argv[1:])
