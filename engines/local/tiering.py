"""The tiers that an engine's settings ask for, and what they say of themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.kv_log import KvLog
from engines.local.config import EngineConfig
from engines.local.kv.eviction import EvictionPolicy
from engines.local.kv.precision import Precision
from engines.local.kv.storage import KVStorage
from engines.local.kv.tiers.disk import DiskTier
from engines.local.kv.tiers.files import Layout
from engines.local.kv.tiers.host import HostTier
from engines.local.kv.tiers.remote import RemoteTier, mooncake
from engines.local.kv.tiers.tiers import Tiers
from engines.local.model import LoadedModel
from engines.local.sizing import disk_bytes, host_bytes


def make_tiers(
    config: EngineConfig,
    model: LoadedModel,
    storage: KVStorage,
    policy: EvictionPolicy,
    *,
    clock: Callable[[], float],
    log: KvLog | None,
    fingerprint: str,
) -> Tiers | None:
    """None where the settings want none. `policy` is the pool's own. Raises ValueError where a tier holds nothing,
    OSError where there can be no folder."""
    capacity = host_bytes(config, model)
    if not capacity:
        return None
    sizes = {Precision.FULL: storage.page_bytes, **storage.unit_bytes()}
    host = HostTier(capacity, sizes, policy, clock=clock, log=log)
    disk = None
    if config.kv_dir is not None:
        layout = layout_of(model, config.block_size, fingerprint)
        disk = DiskTier(Path(config.kv_dir), disk_bytes(config), layout, sizes, clock=clock, report=_report, log=log)
    remote = None
    if config.remote is not None and disk is not None:
        remote = RemoteTier(mooncake(config.remote, config.remote_bytes), disk.layout, report=_report)
    return Tiers(host, storage, disk, remote)


def layout_of(model: LoadedModel, block_size: int, fingerprint: str) -> Layout:
    shapes = sorted(model.shapes.items())
    layers = tuple((layer, shape.kv_heads, shape.key_dim, shape.value_dim) for layer, shape in shapes)
    return Layout(fingerprint, block_size, str(model.dtype).removeprefix("torch."), layers)


def tier_stats(tiers: Tiers | None) -> dict[str, Any]:
    """Fields of report.EngineStats."""
    if tiers is None:
        return {}
    host, disk, counts = tiers.host, tiers.disk, tiers.counts
    loads = {"host": {"bytes": host.nbytes, "capacity": host.capacity, "blocks": host.blocks}}
    told = {
        "tiers": loads,
        "host_tokens": counts.from_host,
        "demoted_tokens": counts.demoted,
        "pieces_lost": counts.lost,
        "pieces_damaged": counts.damaged,
    }
    if disk is None:
        return told
    loads["disk"] = {"bytes": disk.nbytes, "capacity": disk.capacity, "blocks": len(disk)}
    return told | {
        "disk_tokens": counts.from_disk,
        "disk_failed_writes": disk.counts.failed_writes,
        "disk_failed_reads": disk.counts.failed_reads,
        "disk_refused_files": disk.counts.refused,
        "remote_failed": tiers.remote.failed if tiers.remote is not None else 0,
    }


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
