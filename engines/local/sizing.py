"""How many bytes each tier gets: what was asked for, or a share of the free memory; and which units the pool holds."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import psutil
import torch

from engines.blocks import num_blocks
from engines.local.config import EngineConfig
from engines.local.fit import FREE_SHARE, SEALED_SHARE
from engines.local.footprint import step_bytes
from engines.local.kv.precision import POLICIES, SEALED, Precision
from engines.local.kv.quant import UNIT
from engines.local.kv.sealed import Codecs, unit_bytes
from engines.local.kv.tiers.disk import free_bytes
from engines.local.kv.units import Units
from engines.local.model import LoadedModel

HOST_SHARE = 0.25  # of the free memory
HOST_BYTES_CAP = 16 << 30
STAGING_BYTES = 1 << 30  # what is read from a disk comes through host memory
DISK_SHARE = 0.5  # of the free space
DISK_BYTES_CAP = 16 << 30


def disk_bytes(config: EngineConfig) -> int:
    """Bytes of the files in `config.kv_dir`. Without a setting half of the free space, 16 GiB at most."""
    if config.kv_dir is None:
        return 0
    if config.disk_bytes is not None:
        return config.disk_bytes
    return min(int(free_bytes(Path(config.kv_dir)) * DISK_SHARE), DISK_BYTES_CAP)


def host_bytes(config: EngineConfig, model: LoadedModel) -> int:
    """Bytes of the host tier. Without a setting: none on a CPU, whose pool is host memory already, but `STAGING_BYTES`
    before a disk; beside a GPU `HOST_SHARE` of the free memory, `HOST_BYTES_CAP` at most."""
    if config.host_bytes is not None:
        return config.host_bytes
    if model.device.type == "cpu" or not config.prefix_reuse:
        return STAGING_BYTES if config.kv_dir is not None else 0
    return min(int(psutil.virtual_memory().available * HOST_SHARE), HOST_BYTES_CAP)


def pool_pages(config: EngineConfig, model: LoadedModel) -> int:
    """Pages that the configured bytes hold, for all layers together. ValueError when there is room for none."""
    page_bytes = model.kv_bytes_per_token * config.block_size
    wanted = config.pool_bytes
    if wanted is None:
        if model.device.type == "cuda":
            wanted = _of_gpu(config, model, *torch.cuda.mem_get_info(model.device))
        else:
            wanted = min(int(psutil.virtual_memory().available * config.pool_share), config.pool_bytes_cap)
    if _sets_apart(config, model):
        wanted = int(wanted * (1 - SEALED_SHARE))
    pages = wanted // page_bytes - 1  # the guard page
    if pages < 1:
        raise ValueError(f"pool_bytes is {wanted}: a page of {config.block_size} tokens takes {page_bytes} bytes")
    most = config.max_running + config.max_sessions  # windows that could ever be held
    return min(pages, most * num_blocks(model.window, config.block_size))


def pool_units(
    config: EngineConfig, model: LoadedModel, num_pages: int, codecs: Codecs, usable: Set[Precision]
) -> Units:
    """The units that a pool of `num_pages` may hold: none where the policy seals nothing. ValueError where it cannot.

    A precision that is not `usable`, or would take no less than full pages, is left out.
    """
    page_bytes = model.kv_bytes_per_token * config.block_size
    if not POLICIES[config.kv_precision].seals:
        return Units(num_pages, page_bytes=page_bytes)
    pages_per_unit = UNIT // config.block_size
    sizes = {precision: unit_bytes(model.shapes, codecs, precision) for precision in SEALED if precision in usable}
    smaller = {precision: size for precision, size in sizes.items() if size < page_bytes * pages_per_unit}
    if not _sets_apart(config, model):
        return Units(num_pages, pages_per_unit, page_bytes, smaller)
    asked = {rung.precision for rung in (*POLICIES[config.kv_precision].long, *POLICIES[config.kv_precision].full)}
    # a precision that the model does not bear is given up for the next better one
    held = {min((p for p in smaller if p >= precision), default=None) for precision in asked} - {None}
    apart = int(num_pages * page_bytes * SEALED_SHARE / (1 - SEALED_SHARE))
    own = {precision: apart // len(held) for precision in smaller if precision in held}
    return Units(num_pages, pages_per_unit, page_bytes, {p: smaller[p] for p in own}, own)


def _of_gpu(config: EngineConfig, model: LoadedModel, free: int, whole: int) -> int:
    """A card is the engine's own: all that is free now, less what a step and the allocator need (fit.pool_bytes)."""
    return free - step_bytes(model.module, model.shapes, config, model.dtype) - int(whole * FREE_SHARE)


def _sets_apart(config: EngineConfig, model: LoadedModel) -> bool:
    """Whether sealed units have memory of their own: off the CPU, where memory that was taken stays taken."""
    return model.device.type != "cpu" and POLICIES[config.kv_precision].seals
