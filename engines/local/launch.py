"""`turnkeep engine` as a function: a listening socket, a backend behind the front, and the ends that all must have.

    parent's end of stdin closes (--exit-with-parent)  -> stop           code 0
    SIGTERM, SIGINT                                    -> stop           code 0
    the model process ends                             -> errors to its clients, then stop   code 3, start it anew
    the model cannot be loaded                         -> a sentence on stderr               code 1

Imports no torch: the model lives in its own process, and the echo model needs none.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from engines.local.backend import Backend, ModelInfo
from engines.local.in_process import InProcess
from engines.local.model_process import CHILD, ModelProcess
from engines.local.server import Limits, create_app
from engines.local.weights import DEMO_NAME, ModelUnavailable, resolve_model

ECHO = "echo"
ENDED, FAILED, MODEL_DIED = 0, 1, 3
DRAIN_S = 3.0  # running streams get this long after a stop
FLUSH_S = 0.5  # and this long to hear that the model has died
KEEP_ALIVE_S = 75.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    model: str = DEMO_NAME  # a folder, a name, or "echo"
    served_name: str | None = None  # what clients call it; None: the name, or the folder's name
    host: str = "127.0.0.1"
    port: int = 8100  # 0: a free one, told in the ready line
    device: str = "auto"  # auto: a GPU where torch sees one
    dtype: str = "auto"  # auto: float32 on a CPU, the model's own on a GPU
    pool_bytes: int | None = None  # None: a share of the memory that is free
    block_size: int = 32  # tokens
    threads: int | None = None  # None: torch's own choice
    max_batch_tokens: int = 512  # of one step
    background_chunk: int = 32  # of one step of background work
    max_running: int = 32  # sequences of one step
    max_waiting: int = 256  # requests; beyond it 503
    window: int | None = None  # tokens; None: the model's own
    exit_with_parent: bool = False  # stop when standard input closes

    def core(self) -> dict[str, Any]:
        """What the model process needs of them."""
        names = ("device", "dtype", "pool_bytes", "block_size", "threads", "max_batch_tokens", "background_chunk")
        return {name: getattr(self, name) for name in (*names, "max_running", "window")}


class _Server(uvicorn.Server):
    """Leaves the signals to us: uvicorn's own handler raises them again before the model process is closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_engine(options: EngineOptions, *, child: str | None = None) -> int:
    """Serve until an end comes; its exit code. The ready line, one JSON object, goes to standard output.

    `child` names another module to run as the model process (tests do).
    """
    try:
        listener = _listen(options.host, options.port)
    except OSError as error:
        print(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}", file=sys.stderr)
        return FAILED
    with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_serve(options, listener, child))
        except ModelUnavailable as error:
            print(f"the engine cannot start: {error}", file=sys.stderr)
            return FAILED


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: no token waits for another
    return listener


async def _serve(options: EngineOptions, listener: socket.socket, child: str | None) -> int:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    if options.exit_with_parent:
        _stop_with_parent(stop, asyncio.get_running_loop())
    async with _backend(options, child) as backend:
        limits = Limits(max_waiting=options.max_waiting)
        app = create_app(backend, clock=time.monotonic, now=time.time, limits=limits)
        server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE_S),
                timeout_graceful_shutdown=int(DRAIN_S),
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            return await _until_an_end(backend, listener, stop)
        finally:
            server.should_exit = True
            await serving


async def _until_an_end(backend: Backend, listener: socket.socket, stop: asyncio.Event) -> int:
    ends = [asyncio.create_task(stop.wait())]
    if isinstance(backend, ModelProcess):
        ready = asyncio.create_task(backend.ready.wait())
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        ends.append(asyncio.create_task(backend.ended.wait()))
    if backend.state == "ok":
        print(_ready_line(backend.info, listener), flush=True)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    if not isinstance(backend, ModelProcess) or stop.is_set():
        return ENDED
    code = await backend.exit_code()
    if backend.was_ready:
        print(f"the model process ended with code {code}", file=sys.stderr)
        await asyncio.sleep(FLUSH_S)
        return MODEL_DIED
    print(f"the model could not be loaded (the model process ended with code {code})", file=sys.stderr)
    return FAILED


def _ready_line(info: ModelInfo, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    ready = {
        "event": "ready",
        "url": url,
        "model": info.name,
        "window": info.window,
        "device": info.device,
        "dtype": info.dtype,
        "epoch": info.epoch,
        "pid": os.getpid(),
    }
    return orjson.dumps(ready).decode()


@asynccontextmanager
async def _backend(options: EngineOptions, child: str | None) -> AsyncIterator[Backend]:
    if options.model == ECHO and child is None:
        echo = _echo(options)
        try:
            yield echo
        finally:
            await echo.aclose()
        return
    folder = Path(options.model)
    if child is None:
        folder = await asyncio.to_thread(resolve_model, options.model, progress=_report)
    process = ModelProcess(folder, options.core(), name=_served_name(options, folder), child=child or CHILD)
    async with process:
        yield process


def _served_name(options: EngineOptions, folder: Path) -> str:
    """What clients call it: as asked for, else a folder's own name, else the name that was resolved."""
    if options.served_name:
        return options.served_name
    return folder.resolve().name if Path(options.model).expanduser().is_dir() else options.model


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _echo(options: EngineOptions) -> InProcess:
    from engines.echo import ECHO_MODEL_DIR, EchoEngine

    name, epoch = options.served_name or ECHO, secrets.token_hex(8)
    window = options.window or 131_072
    engine = EchoEngine(model=name, epoch=epoch, window=window, block_size=options.block_size)
    info = ModelInfo(name, ECHO_MODEL_DIR, window, 259, options.block_size, "none", "none", epoch)
    return InProcess(engine, info)


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def _stop_with_parent(stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Stop when standard input ends: its other end is the parent's, and closes however the parent dies."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(stop.set)
        time.sleep(2 * DRAIN_S)
        os._exit(ENDED)  # whatever still runs here has nobody left to run for

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
