"""How many pages the KV pool gets: what was asked for, or a share of the memory that is free."""

from __future__ import annotations

import psutil
import torch

from engines.blocks import num_blocks
from engines.local.config import EngineConfig
from engines.local.model import LoadedModel


def pool_pages(config: EngineConfig, model: LoadedModel) -> int:
    """Pages that the configured bytes hold, for all layers together. ValueError when there is room for none."""
    page_bytes = model.kv_bytes_per_token * config.block_size
    wanted = config.pool_bytes
    if wanted is None:
        on_gpu = model.device.type == "cuda"
        free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available
        wanted = int(free * config.pool_share)
        if not on_gpu:
            wanted = min(wanted, config.pool_bytes_cap)
    pages = wanted // page_bytes - 1  # the guard page
    if pages < 1:
        raise ValueError(f"pool_bytes is {wanted}: a page of {config.block_size} tokens takes {page_bytes} bytes")
    most = config.max_running + config.max_sessions  # windows that could ever be held
    return min(pages, most * num_blocks(model.window, config.block_size))
