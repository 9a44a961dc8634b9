"""A real llama.cpp server on a free port, from the wheel `xllamacpp`, which has its C++ server in it:

    python -m tests.contracts.llamacpp_server MODEL.gguf

The first line on standard output is its address; it ends when its standard input closes.
"""

from __future__ import annotations

import sys
from pathlib import Path

WINDOW = 2048  # tokens, for both slots together
SLOTS = 2


def serve(model: Path) -> None:
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(model)
    options.model_alias = {model.stem}
    options.hostnames, options.port = ["127.0.0.1"], 0
    options.n_ctx, options.n_parallel = WINDOW, SLOTS
    options.cpuparams.n_threads = 1
    options.endpoint_metrics = options.endpoint_slots = options.use_jinja = True
    options.cache_ram_mib = 0  # nothing but slots, so that a test sees what they hold
    server = xllamacpp.Server(options)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
