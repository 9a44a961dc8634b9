"""`turnkeep engine`: one replica of our own engine, with its HTTP server (docs/engine-wire.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.settings import DEMO_MODEL


def engine(
    model: Annotated[str, typer.Option(help="A folder, a name, or `echo` (repeats what it is told).")] = DEMO_MODEL,
    served_name: Annotated[str | None, typer.Option(help="What clients call the model. Default: its own name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8100,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: torch's choice.")] = None,
    pool_bytes: Annotated[
        int | None, typer.Option(min=1, help="Memory of the KV pool. Default: by what is free.")
    ] = None,
    host_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Host memory for blocks that the pool gives up. Default: none on a CPU, by what is free beside a GPU.",
        ),
    ] = None,
    kv_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for blocks that host memory gives up, and for suspended sessions. Default: none."),
    ] = None,
    disk_bytes: Annotated[
        int | None, typer.Option(min=1, help="Most bytes in --kv-dir. Default: half of the free space, 16 GiB at most.")
    ] = None,
    remote: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of a Mooncake Store's master, to suspend sessions to; needs --kv-dir."),
    ] = None,
    remote_bytes: Annotated[int, typer.Option(min=0, help="Memory that this engine lends the store; 0: none.")] = 1
    << 30,
    block_size: Annotated[int, typer.Option(min=16, max=64, help="Tokens in a KV block: 16, 32 or 64.")] = 32,
    max_batch_tokens: Annotated[int, typer.Option(min=16, help="Most tokens of one step.")] = 512,
    background_chunk: Annotated[int, typer.Option(min=1, help="Most tokens of a step of background work.")] = 32,
    max_running: Annotated[int, typer.Option(min=1, help="Most sequences of one step.")] = 32,
    max_waiting: Annotated[int, typer.Option(min=0, help="Most requests in the queue; beyond it 503.")] = 256,
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of context. Default: the model's own.")] = None,
    eviction: Annotated[
        str, typer.Option(help="Which cached blocks go first: cost_aware, lru, lfu or adaptive_ttl.")
    ] = "cost_aware",
    max_sessions: Annotated[
        int, typer.Option(min=1, help="Most session caches; the oldest goes for a new one.")
    ] = 1000,
    kv_precision: Annotated[
        str, typer.Option(help="Which cached blocks go to 8 and 4 bits: full (none), auto, seed, int8, k8v4 or int4.")
    ] = "full",
    kv_int8_at: Annotated[
        float | None,
        typer.Option(
            help="Length of a session from which on auto and seed go to INT8: share of the window, or tokens."
        ),
    ] = None,
    kv_int4_at: Annotated[float | None, typer.Option(help="The same for INT4. Default: 0.5; seed: 16384.")] = None,
    kernels: Annotated[
        str,
        typer.Option(
            help="auto: the compiled decoder on a CPU and Triton on a GPU, where model and machine allow it; torch: "
            "neither; native, triton: that one or none. Triton has not yet run on a GPU."
        ),
    ] = "auto",
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="With Triton, replay steps that only decode. Not yet run on a GPU.")
    ] = False,
    speculate: Annotated[
        str,
        typer.Option(
            help="Guess tokens from the path: auto (where the compiled decoder runs), lookup (always) or off."
        ),
    ] = "auto",
    kv_events: Annotated[
        str | None,
        typer.Option(help="Publish what the cache holds, in vLLM's format: tcp://127.0.0.1:PORT (0: a free one)."),
    ] = None,
    kv_replay: Annotated[
        str | None, typer.Option(help="Where subscribers ask for what they missed. Default: a free port beside it.")
    ] = None,
    warm_up: Annotated[
        list[Path] | None,
        typer.Option(help="File of system prompts to hold from the start; may be repeated (docs/engine.md)."),
    ] = None,
    exit_with_parent: Annotated[
        bool, typer.Option("--exit-with-parent", help="Stop when standard input closes, as a gateway's child does.")
    ] = False,
) -> None:
    """Run one replica of the engine. A gateway that is told no upstream starts one by itself."""
    from engines.local.launch import EngineOptions, run_engine

    options = EngineOptions(
        model=model,
        served_name=served_name,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        pool_bytes=pool_bytes,
        host_bytes=host_bytes,
        kv_dir=kv_dir,
        disk_bytes=disk_bytes,
        remote=remote,
        remote_bytes=remote_bytes,
        block_size=block_size,
        threads=threads,
        max_batch_tokens=max_batch_tokens,
        background_chunk=background_chunk,
        max_running=max_running,
        max_waiting=max_waiting,
        window=window,
        eviction=eviction,
        max_sessions=max_sessions,
        kv_precision=kv_precision,
        kv_int8_at=kv_int8_at,
        kv_int4_at=kv_int4_at,
        kernels=kernels,
        cuda_graphs=cuda_graphs,
        speculate=speculate,
        kv_events=kv_events,
        kv_replay=kv_replay,
        warm_up=tuple(warm_up or ()),
        exit_with_parent=exit_with_parent,
    )
    raise typer.Exit(run_engine(options))
