"""Which blocks there are, from the pool's own index or from its events: by name, with the salt and ids behind it.

The name of each block is computed anew from the root on, so that events that tell a wrong parent, salt or id are seen.
"""

from __future__ import annotations

from engines.blocks import block_digest, root_digest
from engines.kv_log import GPU
from engines.kv_stream import ResidentBlocks
from engines.local.kv.prefix import PrefixIndex


def resident(source: PrefixIndex | ResidentBlocks, model: str, medium: str = GPU) -> dict[bytes, bytes]:
    """Name of each block that has a page, or lies in that tier -> its ids."""
    if isinstance(source, PrefixIndex):
        return {node.digest: node.key for node in source._located.values()}
    blocks = source.tier(medium)
    for block in blocks.values():
        parent = root_digest(salt=block.salt, model=model) if block.parent is None else block.parent
        assert block_digest(parent, block.token_bytes) == block.name, "a block's name is not that of its ids"
    return {block.name: block.token_bytes for block in blocks.values()}
