"""Where the gateway listens, and how it starts and stops. Knows no settings and no app.

SIGTERM or SIGINT: no new connections, running answers get `grace_s`, what still runs goes to another gateway or is cut
                   short, the app's lifespan ends, exit 0
a second one:      exit at once, status 128 + signal
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from gateway.api.wire import BoundedHttp
from gateway.commands.failure import CommandFailed, ExitCode

WRITE_TIMEOUT_S = 60.0  # a client that reads nothing for this long is gone: it holds buffers, and perhaps a turn
GC_ALLOCATIONS = 5_000  # before the collector looks; a turn makes hundreds, and next to none of them in cycles
HANDOVER_S = 75.0  # after the grace: turns go to other gateways, and their streams end
STARTUP_FAILED = 3  # uvicorn's exit status when the lifespan did not start


def listen(host: str, port: int, *, write_timeout_s: float = WRITE_TIMEOUT_S) -> socket.socket:
    """A bound socket. Raises CommandFailed with what to do where the address is taken or is not this machine's.

    Its connections end when what was sent stays unread for `write_timeout_s` (Linux; elsewhere by keep-alive alone).
    """
    address = host.strip("[]")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where it reads TCP here; with it an answer can take 40 ms more
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted sockets inherit it; it counts closed windows, too
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(write_timeout_s * 1000))
    try:
        listener.bind((address, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise CommandFailed(ExitCode.ADDRESS, _why(host, port, error)) from error
    return listener


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        return (
            f"Port {port} on {host} is in use, perhaps by another gateway. Stop that one, or take another port: "
            f"--port {other} (--port 0 takes a free one)."
        )
    return (
        f"Cannot listen on {host}:{port}: {error.strerror or error}. Name an address of this machine with --host "
        "(127.0.0.1 always is one), and a port above 1023 with --port."
    )


def run_until_signal(app: Any, listener: socket.socket, *, grace_s: float, on_ready: Callable[[], None]) -> None:
    """Serve `app` (ASGI) until a signal. `app.state.stopping` becomes True with the first one.

    Raises CommandFailed when the app's lifespan did not start; its reason was logged.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHttp,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(grace_s + HANDOVER_S)),
    )
    try:
        _Server(config, on_ready).run(sockets=[listener])
    except SystemExit as stop:
        if stop.code != STARTUP_FAILED:
            raise
        message = "The gateway did not start; the lines above say why. `turnkeep check` looks at each part."
        raise CommandFailed(ExitCode.ENGINE, message) from stop


class _Server(uvicorn.Server):
    """uvicorn's server, which tells when it is ready, ends with status 0, and lets a second signal end it at once."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            gc.collect()
            gc.freeze()  # what is loaded stays: the collector need not walk it with every full collection
            gc.set_threshold(GC_ALLOCATIONS, 20, 20)
            self._on_ready()
            sys.stdout.flush()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in caught}
        try:
            yield
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # asked twice: the store takes a kill at any moment
        self.should_exit = True
        self.config.app.state.stopping = True  # type: ignore[union-attr]
