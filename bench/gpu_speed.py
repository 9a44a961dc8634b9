"""What bench.gpu measures once its checks are through: kernels, copies, serving. On a GPU only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_checks import core_request, prompt, random_model
from bench.gpu_pages import make_pages
from engines.local.config import EngineConfig
from engines.local.engine import LocalEngine
from engines.local.kernels.attend import attend
from engines.local.kernels.path import KernelRow
from engines.local.kernels.step import Kernels
from engines.local.kv.precision import Precision
from engines.local.kv.quant import UNIT
from engines.local.kv.shapes import LayerShape, bytes_per_token
from engines.local.model import LoadedModel, load_model
from engines.local.partial import Scores

HEADS, SHAPE, SIZE = 32, LayerShape(8, 128, 128), 32


def measure(device: torch.device, folder: Path | None, until_s: float) -> dict[str, Any]:
    """Parts that would begin after `until_s` (monotonic) are null."""
    parts: dict[str, Callable[[], Any]] = {
        "decode": lambda: _decode(device),
        "prefill": lambda: _prefill(device),
        "copies": lambda: _copies(device),
        "serving": lambda: _serving(device, folder, until_s),
    }
    return {name: part() if time.monotonic() < until_s else None for name, part in parts.items()}


def _ms(device: torch.device, run: Callable[[], object], repeats: int = 30) -> float:
    """Median of `repeats`, by the device's own clock."""
    for _ in range(3):
        run()
    spans = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        run()
        last.record()
        torch.cuda.synchronize(device)
        spans.append(first.elapsed_time(last))
    return statistics.median(spans)


def _decode(device: torch.device) -> list[dict[str, Any]]:
    """One layer, bfloat16, 32 heads over 8 of 128 channels: milliseconds, and GB/s of K/V that is read."""
    found = []
    for rows, tokens in ((1, 8192), (1, 32768), (16, 8192)):
        units = rows * tokens // UNIT
        pages = make_pages({0: SHAPE}, pages=rows * tokens // SIZE, size=SIZE, dtype=torch.bfloat16, device=device)
        source = np.arange(1, UNIT // SIZE + 1)
        kernels = Kernels(pages.storage, HEADS // SHAPE.kv_heads)
        query = torch.randn(HEADS, rows, 128, device=device, dtype=torch.bfloat16)
        out = query.new_empty(rows, HEADS, 128)
        for precision in Precision:
            each = tokens // SIZE
            if precision == Precision.FULL:
                table = np.arange(1, rows * each + 1, dtype=np.int64)
                nbytes = tokens * bytes_per_token({0: SHAPE}, torch.bfloat16)
            else:
                count = min(units, pages.units.count[precision])
                taken = [pages.seal(source, precision) for _ in range(count)]
                table = np.resize(np.concatenate(taken).astype(np.int64), rows * each)
                nbytes = tokens // UNIT * pages.storage.arenas[precision].unit_bytes
                for unit in taken:
                    pages.units.give(pages.units.unit(int(unit[0])))
            laid = [KernelRow(table[i * each : (i + 1) * each], i, 1, tokens - 1) for i in range(rows)]
            launch = kernels.launch(laid, kernels.decode_rows, split=True)
            scores = Scores(128**-0.5, None, None, None)
            ms = _ms(device, partial(attend, pages.storage, 0, launch, query, scores, out))
            name = precision.name.lower()
            found.append({"rows": rows, "tokens": tokens, "kv": name, "ms": ms, "gb_s": rows * nbytes / ms / 1e6})
        del pages
    return found


def _prefill(device: torch.device) -> list[dict[str, Any]]:
    """A chunk of 512 tokens behind 0, 8,192 and 32,256 others, one layer: milliseconds and TFLOP/s."""
    pages = make_pages({0: SHAPE}, pages=32768 // SIZE, size=SIZE, dtype=torch.bfloat16, device=device)
    kernels = Kernels(pages.storage, HEADS // SHAPE.kv_heads)
    query = torch.randn(HEADS, 512, 128, device=device, dtype=torch.bfloat16)
    out = query.new_empty(512, HEADS, 128)
    found = []
    for past in (0, 8192, 32256):
        table = np.arange(1, (past + 512) // SIZE + 1, dtype=np.int64)
        launch = kernels.launch([KernelRow(table, 0, 512, past)], kernels.chunk_rows, split=False)
        scores = Scores(128**-0.5, None, None, None)
        ms = _ms(device, partial(attend, pages.storage, 0, launch, query, scores, out))
        operations = 4 * HEADS * 128 * 512 * (past + 256)
        found.append({"past": past, "ms": ms, "tflop_s": operations / ms / 1e9})
    return found


def _copies(device: torch.device) -> dict[str, float]:
    """GB/s between device and pinned host memory, 256 MiB at once."""
    here = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    host = torch.zeros(len(here), dtype=torch.uint8, pin_memory=True)
    down = _ms(device, lambda: host.copy_(here, non_blocking=True), 10)
    up = _ms(device, lambda: here.copy_(host, non_blocking=True), 10)
    return {"down_gb_s": len(here) / down / 1e6, "up_gb_s": len(here) / up / 1e6}


def _serving(device: torch.device, folder: Path | None, until_s: float) -> list[dict[str, Any]]:
    """Eight sessions of three turns at once, in this process: tokens a second, TTFT, in seconds."""
    model = random_model(device, large=True) if folder is None else load_model(folder, device=str(device))
    found: list[dict[str, Any]] = []
    settings: tuple[dict[str, Any], ...] = (
        {"kernels": "torch"},
        {"kernels": "triton"},
        {"kernels": "triton", "cuda_graphs": True},
        {"kernels": "triton", "cuda_graphs": True, "kv_precision": "int8"},
    )
    for setting in settings:
        if time.monotonic() > until_s:
            found.append(setting | {"skipped": True})
            continue
        pool = 65536 * model.kv_bytes_per_token
        config = EngineConfig(pool_bytes=pool, max_batch_tokens=2048, seed=1, **setting)
        engine = LocalEngine(model, config, time.monotonic)
        _turns(engine, model, "warm")  # compiles and records
        found.append(setting | _turns(engine, model, "timed") | {"peak_bytes": torch.cuda.max_memory_allocated(device)})
        del engine
    return found


def _turns(engine: LocalEngine, model: LoadedModel, name: str) -> dict[str, float]:
    began, first_s, count = time.monotonic(), [], 0
    paths = [prompt(model.vocab_size, 1024, hash((name, i)) % 100_000) for i in range(8)]
    for turn in range(3):
        sent = time.monotonic()
        waiting = set()
        for i, path in enumerate(paths):
            path += prompt(model.vocab_size, 128, 1000 * turn + i)
            engine.submit(core_request(f"{name}{turn}.{i}", path, 64, session=f"{name}{i}"))
            waiting.add(f"{name}{turn}.{i}")
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.ids and output.request_id in waiting:
                    waiting.discard(output.request_id)
                    first_s.append(time.monotonic() - sent)
                count += len(output.ids)
                paths[int(output.request_id.rpartition(".")[2])] += output.ids
    spent = time.monotonic() - began
    first_s.sort()
    return {
        "tokens_s": count / spent,
        "ttft_p50_s": statistics.median(first_s),
        "ttft_p95_s": first_s[int(0.95 * (len(first_s) - 1))],
    }
