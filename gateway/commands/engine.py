"""`turnkeep engine`: one replica of our own engine, with its HTTP server (docs/engine-wire.md)."""

from __future__ import annotations

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
    block_size: Annotated[int, typer.Option(min=16, max=64, help="Tokens in a KV block: 16, 32 or 64.")] = 32,
    max_batch_tokens: Annotated[int, typer.Option(min=16, help="Most tokens of one step.")] = 512,
    background_chunk: Annotated[int, typer.Option(min=1, help="Most tokens of a step of background work.")] = 32,
    max_running: Annotated[int, typer.Option(min=1, help="Most sequences of one step.")] = 32,
    max_waiting: Annotated[int, typer.Option(min=0, help="Most requests in the queue; beyond it 503.")] = 256,
    window: Annotated[int | None, typer.Option(min=1, help="Tokens of context. Default: the model's own.")] = None,
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
        block_size=block_size,
        threads=threads,
        max_batch_tokens=max_batch_tokens,
        background_chunk=background_chunk,
        max_running=max_running,
        max_waiting=max_waiting,
        window=window,
        exit_with_parent=exit_with_parent,
    )
    raise typer.Exit(run_engine(options))
