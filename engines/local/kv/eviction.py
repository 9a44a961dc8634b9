"""Which cached pages go first. A policy only orders candidates; the pool decides when and how many.

A stamp is the pool's clock: it grows with every release, and within one release the tail of a path is stamped older
than its head, so that a chain is evicted from its end.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EvictionPolicy(Protocol):
    def order(self, pages: NDArray[np.int32], stamps: NDArray[np.int64]) -> NDArray[np.int32]:
        """`pages` (unreferenced, cached) with their `stamps`, the first victim first."""
        ...


class Lru:
    """Least recently released first."""

    def order(self, pages: NDArray[np.int32], stamps: NDArray[np.int64]) -> NDArray[np.int32]:
        return pages[np.argsort(stamps, kind="stable")]
