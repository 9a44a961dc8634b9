"""One piece of K/V outside the device pool: a full page, a path's partial last page, or a sealed unit. A value.

A piece is named by what it holds, as the prefix index names its blocks: SHA-256 over the name of what stands before it
and its ids, the root over salt and model. So equal names mean equal K/V, in another tier, process or machine. How it is
held (precision) is no part of the name.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engines.blocks import block_digest
from engines.local.kv.precision import Precision

ID_BYTES = 4


@dataclass(slots=True, eq=False)
class Piece:
    """`names`: of its blocks in order; of a unit several. `salt`: that of the root, where it begins a path."""

    names: tuple[bytes, ...]
    parent: bytes  # name of the block before it, or of the root
    token_bytes: bytes  # u32 little-endian, of all its tokens
    salt: str | None = None
    precision: Precision = Precision.FULL
    lineage: int = Precision.FULL  # the fewest bits that it was made from
    partial: bool = False  # the last block of a path: fewer tokens than a block has
    gain: float = 1.0  # prefill cost over bytes
    group: int = 0  # of the eviction policy
    released_s: float = 0.0  # when it was last used
    users: set[int] = field(default_factory=set)  # sessions (their tags) that have used it; 0: somebody without one
    crc: int = 0  # CRC-32 of its content
    from_disk: bool = False  # it was read from a file

    @property
    def name(self) -> bytes:
        return self.names[-1]

    @property
    def content(self) -> int:
        """Its name as eviction policies take it (eviction.Used)."""
        return 0 if self.partial else content_name(self.name)

    @property
    def num_tokens(self) -> int:
        return len(self.token_bytes) // ID_BYTES

    def good(self, min_bits: int) -> bool:
        """Whether it, and all it was made from, has `min_bits`."""
        return min(self.precision, self.lineage) >= min(min_bits, Precision.FULL)

    def forget(self, tag: int) -> bool:
        """That session uses it no more -> whether it has to go. A unit goes with the first of its users: nobody knows
        which of its blocks were that one's alone."""
        if tag in self.users:
            self.users.discard(tag)
            if len(self.names) > 1:
                self.users.clear()
        return not self.users

    def begins(self, name: bytes, parent: bytes, token_bytes: bytes) -> int | None:
        """Which of its blocks has that name, and those ids after that block; None: none. A name alone is never
        trusted."""
        block = (name, parent, token_bytes)
        return next((at for at, mine in enumerate(self.blocks()) if mine == block), None)

    def blocks(self) -> list[tuple[bytes, bytes, bytes]]:
        """(name, name of the one before, token bytes) of each block."""
        size = len(self.token_bytes) // len(self.names)
        parents = (self.parent, *self.names[:-1])
        return [
            (name, parent, self.token_bytes[at * size : (at + 1) * size])
            for at, (name, parent) in enumerate(zip(self.names, parents, strict=True))
        ]

    def named_right(self) -> bool:
        """The names are those of its ids."""
        return all(block_digest(parent, ids) == name for name, parent, ids in self.blocks())


def content_name(digest: bytes) -> int:
    """A block's outside name as a number of 63 bits, never 0. A collision would mistake one block's history for
    another's, no more."""
    return int.from_bytes(digest[:8], "little") >> 1 | 1


def checksum(content: Tensor) -> int:
    """CRC-32 of uint8 on the CPU: some 3 GB/s."""
    return zlib.crc32(np.ascontiguousarray(content.numpy()).data)
