"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from engines.local.kv.cost_aware import CostAware
from engines.local.kv.eviction import AdaptiveTtl, EvictionPolicy, Lfu, Lru

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {"cost_aware": CostAware, "lru": Lru, "lfu": Lfu, "adaptive_ttl": AdaptiveTtl}
)
DEFAULT_POLICY = "cost_aware"


def make_policy(name: str) -> EvictionPolicy:
    """A new policy, with a history of its own. KeyError for a name that is none."""
    return POLICIES[name]()
