"""Which cached pages go first: the contract of a policy, and three plain ones. `cost_aware` has the default.

A policy sorts pages into groups when they are let go, and says what the page that is idle longest in a group is worth.
The evictor (evictor.py) keeps each group in the order of release and gives up what is worth least, so a policy never
walks over pages. Within a release the tail of a path goes before its head, and a page with cached descendants waits
for them: whatever the policy says, a chain is evicted from its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.history import History

Groups = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Used:
    """Pages of one path that were just let go, its head first."""

    names: NDArray[np.int64]  # of their content, distinct, below 0 for a partial block; 0: known to its session alone
    gains: NDArray[np.float64]  # prefill cost over bytes; 1: a full page, full precision, at the head of a prompt


class EvictionPolicy(Protocol):
    """Of one group, worth never rises with idle time."""

    @property
    def name(self) -> str: ...

    def groups(self, used: Used, now_s: float) -> Groups:
        """A group for each page."""
        ...

    def worth(self, group: int, idle_s: float) -> float:
        """Of a page of `group`, `idle_s` seconds after it was let go. The least goes first."""
        ...


class Lru:
    """Least recently released first."""

    name = "lru"

    def groups(self, used: Used, now_s: float) -> Groups:
        return np.zeros(len(used.names), np.int64)

    def worth(self, group: int, idle_s: float) -> float:
        return -idle_s


class Lfu:
    """Least often used first, of equals the least recently released. Uses are counted over a bounded history, whether
    the block was evicted in between or not."""

    name = "lfu"
    MOST = 255  # beyond, more uses count no more: groups stay few

    def __init__(self, history: History | None = None) -> None:
        self._history = history or History()

    def groups(self, used: Used, now_s: float) -> Groups:
        groups = np.zeros(len(used.names), np.int64)
        named = np.flatnonzero(used.names)[: self._history.size]
        groups[named] = np.minimum(self._history.record(used.names[named], now_s).uses, self.MOST)
        return groups

    def worth(self, group: int, idle_s: float) -> float:
        return float(group)


class AdaptiveTtl:
    """A block lives `factor` times its mean time between uses, within bounds; `first_s` while it was used once.

    The one whose time ran out longest ago goes first; where nobody's has, the one whose time is nearest. So what has
    gone idle always goes, however regular it once was.
    """

    name = "adaptive_ttl"
    STEPS = 4  # groups to a doubling of the lifetime

    def __init__(
        self,
        *,
        factor: float = 2.0,
        first_s: float = 120.0,
        min_s: float = 30.0,
        max_s: float = 1800.0,
        history: History | None = None,
    ) -> None:
        self._factor, self._first_s, self._min_s, self._max_s = factor, first_s, min_s, max_s
        self._history = history or History()

    def groups(self, used: Used, now_s: float) -> Groups:
        ttl_s = np.full(len(used.names), self._min_s)
        named = np.flatnonzero(used.names)[: self._history.size]
        gap_s = self._history.record(used.names[named], now_s).gap_s
        ttl_s[named] = np.where(np.isnan(gap_s), self._first_s, self._factor * gap_s)
        steps = np.round(self.STEPS * np.log2(np.clip(ttl_s, self._min_s, self._max_s)))
        return np.asarray(steps, np.int64)

    def worth(self, group: int, idle_s: float) -> float:
        return math.exp2(group / self.STEPS) - idle_s
