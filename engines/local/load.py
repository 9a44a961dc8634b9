"""From a folder and options to a core that is ready to run: the model process's first minute."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from engines.local.backend import Status
from engines.local.config import EngineConfig
from engines.local.engine import CoreRequest, EngineStats, LocalEngine
from engines.local.grammar import Grammars
from engines.local.model import ModelRefused, load_model
from engines.local.process import Core, Loaded

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CORE_OPTIONS = ("pool_bytes", "block_size", "max_batch_tokens", "background_chunk", "max_running", "window")


def load_core(folder: Path, options: dict[str, Any]) -> Loaded:
    """`options` are those of launch.EngineOptions.core(). Ends the process with a sentence where it cannot be done."""
    if options["threads"] is not None:
        torch.set_num_threads(options["threads"])
    try:
        config = EngineConfig(**{name: options[name] for name in CORE_OPTIONS})
        model = load_model(folder, device=_device(options["device"]), dtype=DTYPES[options["dtype"]])
        grammars = Grammars(folder, vocab=model.vocab_size, eos_ids=sorted(model.stop_ids))
        core = LocalEngine(model, config, time.monotonic, grammars)
    except (ModelRefused, ValueError, OSError, MemoryError, torch.OutOfMemoryError) as error:
        sys.exit(f"the model cannot be served: {error}")
    return Loaded(
        core=core,
        make_request=CoreRequest,
        status=status,
        window=core.window,
        vocab=model.vocab_size,
        block_size=config.block_size,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        no_shift=model.no_shift,
    )


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


COUNTERS = ("steps", "prefill_tokens", "decode_tokens", "cached_tokens", "shifted_tokens", "preemptions", "evictions")


def status(core: Core, pool_ok: bool) -> Status:
    stats: EngineStats = core.stats()
    return Status(
        running=stats.running,
        waiting=stats.waiting,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        blocks_cached=stats.blocks_cached,
        blocks_used=stats.blocks_used,
        pool_ok=pool_ok,
        counters={name: getattr(stats, name) for name in COUNTERS},
    )
