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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from engines.kv_stream import KvStream
from engines.local.backend import Backend, ModelInfo
from engines.local.in_process import InProcess
from engines.local.kv.events import KvEndpointRefused, KvPublisher
from engines.local.model_process import CHILD, ModelProcess
from engines.local.server import Limits, create_app
from engines.local.texts import Texts
from engines.local.warm_up import WarmUp, WarmUpRefused, read_warm_ups, warm_up
from engines.local.weights import DEMO_NAME, ModelUnavailable, resolve_model

ECHO = "echo"
KV_PRECISION = ("kv_precision", "kv_int8_at", "kv_int4_at")
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
    eviction: str = "cost_aware"  # which cached blocks go first (local/kv/policies.py)
    max_sessions: int = 1000  # session caches
    host_bytes: int | None = None  # host memory for evicted blocks; None: by device (local/sizing.py)
    kv_dir: Path | None = None  # folder for blocks that host memory gives up, and for suspended sessions; None: none
    remote: str | None = None  # HOST:PORT of a Mooncake Store's master, for suspended sessions; needs kv_dir
    remote_bytes: int = 1 << 30  # of memory that this engine lends the store
    disk_bytes: int | None = None  # of files there; None: half of the free space, 16 GiB at most
    kv_precision: str = "full"  # which cached blocks go to fewer bits: full, auto, seed, int8, k8v4, int4
    kv_int8_at: float | None = None  # path length from which on; up to 1 of the window, above tokens
    kv_int4_at: float | None = None
    cuda_graphs: bool = False  # with Triton: replay steps that only decode
    kernels: str = "auto"  # torch, native (the compiled decoder), triton; auto: by device and model
    speculate: str = "auto"  # auto: guess tokens from the path where the compiled decoder runs; lookup: everywhere; off
    kv_events: str | None = None  # where to publish what the cache holds: tcp://HOST:PORT (0: a free one), ipc://PATH
    kv_replay: str | None = None  # where subscribers ask for what they missed; None: beside it
    warm_up: tuple[Path, ...] = ()  # files of prompts to hold from the start (warm_up.py)
    exit_with_parent: bool = False  # stop when standard input closes

    def core(self) -> dict[str, Any]:
        """What the model process needs of them."""
        names = ("device", "dtype", "pool_bytes", "block_size", "threads", "max_batch_tokens", "background_chunk")
        more = ("max_running", "window", "eviction", "max_sessions", "kernels", "cuda_graphs", "speculate")
        tiers = ("host_bytes", "disk_bytes", "remote", "remote_bytes")
        told = {name: getattr(self, name) for name in (*names, *more, *tiers, *KV_PRECISION)}
        kv_dir = str(self.kv_dir) if self.kv_dir is not None else None
        return told | {"kv_events": self.kv_events is not None, "kv_dir": kv_dir}


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
        prompts = read_warm_ups(options.warm_up)
    except WarmUpRefused as error:
        print(f"the engine cannot start: {error}", file=sys.stderr)
        return FAILED
    try:
        listener = _listen(options.host, options.port)
    except OSError as error:
        print(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}", file=sys.stderr)
        return FAILED
    with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            return runner.run(_serve(options, listener, child, prompts))
        except (ModelUnavailable, KvEndpointRefused) as error:
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


async def _serve(options: EngineOptions, listener: socket.socket, child: str | None, prompts: Sequence[WarmUp]) -> int:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    if options.exit_with_parent:
        _stop_with_parent(stop, asyncio.get_running_loop())
    async with AsyncExitStack() as stack:
        kv = None
        if options.kv_events is not None:
            publisher = KvPublisher(KvStream(time.time), options.kv_events, replay=options.kv_replay)
            kv = await stack.enter_async_context(publisher)
        backend = await stack.enter_async_context(_backend(options, child, kv.stream if kv is not None else None))
        kv_dir = Path(options.kv_dir) if options.kv_dir is not None else None
        limits = Limits(max_waiting=options.max_waiting, max_kv_bytes=options.disk_bytes or Limits().max_kv_bytes)
        app = create_app(backend, clock=time.monotonic, now=time.time, limits=limits, kv=kv, kv_dir=kv_dir)
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
            return await _until_an_end(backend, listener, stop, kv, prompts)
        finally:
            server.should_exit = True
            await serving


async def _until_an_end(
    backend: Backend, listener: socket.socket, stop: asyncio.Event, kv: KvPublisher | None, prompts: Sequence[WarmUp]
) -> int:
    ends = [asyncio.create_task(stop.wait())]
    if isinstance(backend, ModelProcess):
        ready = asyncio.create_task(backend.ready.wait())
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        ends.append(asyncio.create_task(backend.ended.wait()))
    warming: asyncio.Task[None] | None = None
    if backend.state == "ok":
        print(_ready_line(backend.info, listener, kv), flush=True)
        warming = asyncio.create_task(_warm_up(backend, prompts)) if prompts else None
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if warming is not None:
        warming.cancel()
        await asyncio.wait([warming])
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


async def _warm_up(backend: Backend, prompts: Sequence[WarmUp]) -> None:
    info = backend.info
    texts = await asyncio.to_thread(Texts, info.folder, info.window)
    done = await warm_up(backend, prompts, partial(texts.encode, special=False), model=info.name, report=_report)
    _report(f"warmed up with {done} of {len(prompts)} prompts")


def _ready_line(info: ModelInfo, listener: socket.socket, kv: KvPublisher | None) -> str:
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
    if kv is not None:
        ready |= {"kv_events": kv.endpoint, "kv_replay": kv.replay}
    return orjson.dumps(ready).decode()


@asynccontextmanager
async def _backend(options: EngineOptions, child: str | None, kv: KvStream | None) -> AsyncIterator[Backend]:
    if options.model == ECHO and child is None:
        echo = _echo(options, kv)
        try:
            yield echo
        finally:
            await echo.aclose()
        return
    folder = Path(options.model)
    if child is None:
        folder = await asyncio.to_thread(resolve_model, options.model, progress=_report)
    name = _served_name(options, folder)
    process = ModelProcess(folder, options.core(), name=name, child=child or CHILD, kv=kv)
    async with process:
        yield process


def _served_name(options: EngineOptions, folder: Path) -> str:
    """What clients call it: as asked for, else a folder's own name, else the name that was resolved."""
    if options.served_name:
        return options.served_name
    return folder.resolve().name if Path(options.model).expanduser().is_dir() else options.model


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _echo(options: EngineOptions, kv: KvStream | None) -> InProcess:
    from engines.echo import ECHO_MODEL_DIR, EchoEngine

    name, epoch = options.served_name or ECHO, secrets.token_hex(8)
    window = options.window or 131_072
    engine = EchoEngine(model=name, epoch=epoch, window=window, block_size=options.block_size, kv=kv)
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
