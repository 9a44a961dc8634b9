"""What a cache stored and removed since it was last asked, as KV events: the net of it, parents before children.

    stored, removed, stored  -> stored         removed, stored  -> nothing: it was there, and is there
    stored, removed          -> nothing

Each tier is an account of its own. A block that changes tiers is told to be in the one before it is told to have left
the other, so it is somewhere all the time. Pure; each call costs a dictionary entry, so a step is not slowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from engines.kv_events import BlockRemoved, BlockStored, KvEvent

MAX_RUN = 1024  # blocks of one event
GPU = "GPU"  # vLLM's word for the first tier, on a CPU backend too
CPU = "CPU"  # for host memory
STORAGE = "STORAGE"  # for what lies further down


@dataclass(frozen=True, slots=True)
class Block:
    """One stored block. `parent` None: it begins at the root, which `salt` belongs to."""

    name: bytes
    parent: bytes | None
    token_bytes: bytes  # u32 little-endian
    salt: str = ""


@dataclass(slots=True)
class _Tier:
    stored: dict[bytes, Block] = field(default_factory=dict)
    removed: dict[bytes, None] = field(default_factory=dict)


class KvLog:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tiers = {GPU: _Tier()}

    def stored(self, block: Block, medium: str = GPU) -> None:
        tier = self._tiers.setdefault(medium, _Tier())
        if block.name in tier.removed:
            del tier.removed[block.name]
        else:
            tier.stored[block.name] = block

    def removed(self, name: bytes, medium: str = GPU) -> None:
        tier = self._tiers.setdefault(medium, _Tier())
        if name in tier.stored:
            del tier.stored[name]
        else:
            tier.removed[name] = None

    def drain(self) -> tuple[KvEvent, ...]:
        """What became of the blocks since the last call: of the first tier, removals first; of the others, last."""
        tiers, self._tiers = self._tiers, {GPU: _Tier()}
        events: list[KvEvent] = []
        for medium, tier in tiers.items():
            if medium != GPU:
                events += runs(tier.stored.values(), self._block_size, medium=medium)
        events += _removals(tiers[GPU].removed, GPU)
        events += runs(tiers[GPU].stored.values(), self._block_size)
        for medium, tier in tiers.items():
            if medium != GPU:
                events += _removals(tier.removed, medium)
        return tuple(events)


def _removals(names: Iterable[bytes], medium: str) -> Iterator[BlockRemoved]:
    left = iter(names)
    while run := tuple(islice(left, MAX_RUN)):
        yield BlockRemoved(run, medium)


def runs(blocks: Iterable[Block], block_size: int, *, most: int = MAX_RUN, medium: str = GPU) -> Iterator[BlockStored]:
    """`blocks` in their order, each run in which one follows the other as one event, of `most` blocks at most."""
    run: list[Block] = []
    for block in blocks:
        if run and (block.parent != run[-1].name or len(run) == most):
            yield _event(run, block_size, medium)
            run = []
        run.append(block)
    if run:
        yield _event(run, block_size, medium)


def _event(run: list[Block], block_size: int, medium: str) -> BlockStored:
    first = run[0]
    extra = ((first.salt,), *(None for _ in run[1:])) if first.parent is None and first.salt else ()
    ids = b"".join(block.token_bytes for block in run)
    return BlockStored(tuple(block.name for block in run), first.parent, ids, block_size, medium, None, extra)
