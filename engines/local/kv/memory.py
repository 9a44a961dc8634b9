"""Memory that is reserved at once and used bit by bit: a page that was given back takes no room until it is written
again. On a CPU only: another device takes all of it at once and gives nothing back.

    reserve   address space for the whole; nothing is resident
    write     the operating system brings in zeroed pages
    discard   they go back to it; what was there reads as zeros (Linux), or may (elsewhere)
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
from torch import Tensor


class Memory(Protocol):
    """`bytes`, uint8 [nbytes], zeros at first."""

    bytes: Tensor

    def discard(self, start: int, stop: int) -> None: ...


def reserve(nbytes: int, device: torch.device) -> Memory:
    return Reserved(nbytes) if device.type == "cpu" else Allocated(nbytes, device)


class Allocated:
    """`bytes`, uint8 [nbytes], on `device`; taken as long as this lives."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def discard(self, start: int, stop: int) -> None:
        """Nothing: the memory stays ours."""


class Reserved:
    """`bytes`, uint8 [nbytes], on the CPU."""

    def __init__(self, nbytes: int) -> None:
        # an anonymous private map: what was never written is not resident, however large it is
        flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._map = mmap.mmap(-1, max(nbytes, 1), **flags)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:nbytes]

    def discard(self, start: int, stop: int) -> None:
        """Give back what lies between, as far as it fills whole pages of the operating system."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, first, length)
