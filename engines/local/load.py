"""From a folder and options to a core that is ready to run: the model process's first minute."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from engines.local.backend import Status
from engines.local.config import EngineConfig
from engines.local.engine import CoreRequest, EngineStats, LocalEngine
from engines.local.grammar import Grammars
from engines.local.identity import model_fingerprint
from engines.local.kv.precision import POLICIES
from engines.local.model import LoadedModel, ModelRefused, load_model
from engines.local.process import Core, Loaded
from engines.local.room import room
from engines.local.self_check import Borne, self_check, text_ids

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CORE_OPTIONS = (
    *("pool_bytes", "block_size", "max_batch_tokens", "background_chunk", "max_running", "window"),
    *("eviction", "max_sessions", "kv_events"),
    *("kv_precision", "kv_int8_at", "kv_int4_at", "kernels", "cuda_graphs", "speculate"),
    *("host_bytes", "kv_dir", "disk_bytes", "remote", "remote_bytes"),
)


def load_core(folder: Path, options: dict[str, Any]) -> Loaded:
    """`options` are those of launch.EngineOptions.core(). Ends the process with a sentence where it cannot be done."""
    if options["threads"] is not None:
        torch.set_num_threads(options["threads"])
    try:
        config = EngineConfig(**{name: options[name] for name in CORE_OPTIONS})
        device, dtype = _device(options["device"]), DTYPES[options["dtype"]]
        refuse_too_large(folder, device, dtype, config)
        model = load_model(folder, device=device, dtype=dtype)
        grammars = Grammars(folder, vocab=model.vocab_size, eos_ids=sorted(model.stop_ids))
        borne = _borne(model, config)
        fingerprint = model_fingerprint(folder) if config.kv_dir is not None else ""
        core = LocalEngine(model, config, time.monotonic, grammars, usable=borne.usable, fingerprint=fingerprint)
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
        no_native=core.no_native,
        eviction=config.eviction,
        kv_events=core.kv_events if config.kv_events else None,
        suspension=core.suspension,
        attention=core.attention.report(),
        kv_refused={precision.codec: reason for precision, reason in borne.refused.items()},
    )


def refuse_too_large(folder: Path, device: str, dtype: torch.dtype | None, config: EngineConfig) -> None:
    """Raise ModelRefused, with the arithmetic, where the weights do not go into the memory that is free."""
    on_gpu = device.startswith("cuda")
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    dtype = dtype or (None if on_gpu else torch.float32)
    item_bytes = dtype.itemsize if dtype is not None else None
    gpu = device if on_gpu else None
    taken = room(folder, item_bytes=item_bytes, pool_bytes=config.pool_bytes or 0, free_bytes=free, gpu=gpu)
    if not taken.fits:
        raise ModelRefused(f"{folder.name} does not fit: {taken.told()}")


def _borne(model: LoadedModel, config: EngineConfig) -> Borne:
    """Which precisions this model bears; those that it does not are told on standard error, and by /health."""
    if not POLICIES[config.kv_precision].seals:
        return Borne({}, {})
    began_s = time.monotonic()
    borne = self_check(model, config, text_ids(model))
    told = ", ".join(f"{precision.codec} KL {kl:.1e}" for precision, kl in borne.kl.items())
    print(f"KV codecs checked in {time.monotonic() - began_s:.1f} s: {told}", file=sys.stderr, flush=True)
    for precision, reason in borne.refused.items():
        print(f"kv_precision: {precision.codec} is not used: {reason}", file=sys.stderr, flush=True)
    return borne


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


GAUGES = ("sessions", "blocks_pinned")
COUNTERS = (
    "steps",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "shifted_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "preemptions",
    "evictions",
    "units_sealed",
    *("host_tokens", "disk_tokens", "demoted_tokens", "pieces_lost", "pieces_damaged"),
    *("disk_failed_writes", "disk_failed_reads", "disk_refused_files", "remote_failed"),
)


def status(core: Core, pool_ok: bool) -> Status:
    stats: EngineStats = core.stats()
    return Status(
        running=stats.running,
        waiting=stats.waiting,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        blocks_cached=stats.blocks_cached,
        blocks_used=stats.blocks_used,
        pool_bytes=stats.pool_bytes,
        sealed_bytes=stats.sealed_bytes,
        sealed=dict(stats.sealed),
        tiers={name: dict(load) for name, load in stats.tiers.items()},
        pool_ok=pool_ok,
        counters={name: getattr(stats, name) for name in COUNTERS},
        gauges={name: getattr(stats, name) for name in GAUGES},
    )
