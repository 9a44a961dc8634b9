"""Blocks of token ids, and their names outside this process. Pure: knows no pool and no index.

A path of ids is cut into blocks of equal size; the last may be partial and has no name.

    ids      | 0 ... B-1 | B ... 2B-1 | 2B ... |
    digest   root -> d0 ->     d1             (the partial block: none)

Inside one process the prefix index compares token bytes exactly and needs no digest; a digest names a block in events,
in files and in other tiers.
"""

from __future__ import annotations

import hashlib
from array import array

ROOT_VERSION = b"turnkeep.blocks.1"


def root_digest(*, salt: str, model: str, adapter: str = "") -> bytes:
    """Name of the empty path. Every field is tagged and length-prefixed, so no two settings spell the same bytes."""
    digest = hashlib.sha256(ROOT_VERSION)
    for tag, value in (("salt", salt), ("model", model), ("adapter", adapter)):
        for part in (tag.encode(), value.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_digest(parent: bytes, token_bytes: bytes) -> bytes:
    """Name of a full block: SHA-256 over the parent's digest (32 bytes) and the block's ids (u32 little-endian)."""
    return hashlib.sha256(parent + token_bytes).digest()


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` touch, the partial one included."""
    return -(-num_tokens // block_size)


def ids_from_bytes(data: bytes) -> array[int]:
    """Token ids of a u32 little-endian string; ValueError when its length is no multiple of 4."""
    ids = array("I")
    ids.frombytes(data)
    return ids
