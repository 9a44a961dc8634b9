"""What a replica's KV events say that it holds: its blocks, mapped to the keys of `chain`. Knows no turns and no clock.

    key -> credit, of the best of all blocks that end it
    block: (rank, the engine's own name) -> where its path stands, the keys it completed, the tiers it lies in

Each data-parallel rank has a cache of its own: what one loses the others keep. A model with several kinds of attention
tells of each (`group`), and gives the blocks of a sliding window up early; the first group alone is counted, as whose
blocks a prefix is found by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engines.kv_events import BlockRemoved, BlockStored
from gateway.fleet.chain import Chain, extend, root

UNKNOWN = "unknown"  # all tiers of other names are one
CREDIT = {"GPU": 1.0, "CPU": 0.8, "STORAGE": 0.5, UNKNOWN: 0.5}  # of a token that must first be fetched from there

Id = bytes | tuple[int, bytes]  # the first rank's names alone: nearly always all there are


class Block(NamedTuple):
    """A named tuple, because one is made for every block that an engine stores."""

    end: Chain
    keys: tuple[bytes, ...]
    media: frozenset[str]
    credit: float

    def lying_in(self, media: frozenset[str]) -> Block:
        return Block(self.end, self.keys, media, max(CREDIT[medium] for medium in media))


def _tier(event: BlockStored | BlockRemoved) -> str:
    medium = event.medium or "GPU"
    return medium if medium in CREDIT else UNKNOWN


def counted(event: BlockStored | BlockRemoved) -> bool:
    return not event.group


@dataclass(slots=True)
class Told:
    """`gone` is told each key that no block ends any more."""

    gone: Callable[[bytes], None]
    credits: dict[bytes, float] = field(default_factory=dict)
    blocks: dict[Id, Block] = field(default_factory=dict)
    several: dict[bytes, list[float]] = field(default_factory=dict)  # credits of keys that more than one block ends
    ranks: int = 1
    unknown_parents: int = 0

    def store(self, event: BlockStored, *, rank: int, model: str) -> tuple[bytes, list[bytes]]:
        """Note the blocks -> the key that they follow, and theirs: none where their ids or their parent are unknown."""
        self.ranks = max(self.ranks, rank + 1)
        medium = _tier(event)
        if not event.spelled:
            for name in event.hashes:
                if (known := self.blocks.get(_id(rank, name))) is not None:
                    self._put(_id(rank, name), known, known.lying_in(known.media | {medium}))
            return b"", []
        if event.parent is None:
            at = root(salt=event.salt, model=model, adapter=event.lora_name or "")
        elif (parent := self.blocks.get(_id(rank, event.parent))) is not None:
            at = parent.end
        else:
            self.unknown_parents += 1
            return b"", []
        start, keys, media = at.key, list[bytes](), frozenset((medium,))
        credit = CREDIT[medium]
        for name, ids in event.blocks():
            at, made = extend(at, ids)
            keys += made
            id, ends = _id(rank, name), tuple(made)
            known = self.blocks.get(id)
            if known is not None and known.keys != ends:  # its removal was never told
                self._drop(id, known)
                known = None
            if known is None:
                self.blocks[id] = Block(at, ends, media, credit)
                self._hold(made, credit)
            else:
                self._put(id, known, known.lying_in(known.media | media))
        return start, keys

    def remove(self, event: BlockRemoved, *, rank: int) -> None:
        for name in event.hashes:
            id = _id(rank, name)
            known = self.blocks.get(id)
            if known is None:
                continue
            media = known.media - {_tier(event)}
            if media:
                self._put(id, known, known.lying_in(media))
            else:
                self._drop(id, known)

    def forget(self, rank: int) -> bool:
        """What the rank held -> whether another one holds something."""
        mine = [id for id in self.blocks if _rank(id) == rank]
        if len(mine) == len(self.blocks):
            self.clear()
            return False
        for id in mine:
            self._drop(id, self.blocks[id])
        return True

    def clear(self) -> None:
        for each in (self.credits, self.blocks, self.several):
            each.clear()

    def _put(self, id: Id, before: Block, block: Block) -> None:
        """The same block in other tiers."""
        self.blocks[id] = block
        credit = block.credit
        if before.credit == credit:
            return
        for key in block.keys:
            if (holders := self.several.get(key)) is None:
                self.credits[key] = credit
            else:
                holders[holders.index(before.credit)] = credit
                self.credits[key] = max(holders)

    def _hold(self, keys: Iterable[bytes], credit: float) -> None:
        for key in keys:
            known = self.credits.get(key)
            if known is None:
                self.credits[key] = credit
            else:
                self.several.setdefault(key, [known]).append(credit)
                self.credits[key] = max(known, credit)

    def _drop(self, id: Id, block: Block) -> None:
        del self.blocks[id]
        credit = block.credit
        for key in block.keys:
            holders = self.several.get(key)
            if holders is None:
                self.credits.pop(key, None)
                self.gone(key)
                continue
            holders.remove(credit)
            self.credits[key] = max(holders)
            if len(holders) == 1:
                del self.several[key]


def _id(rank: int, name: bytes) -> Id:
    return name if rank == 0 else (rank, name)


def _rank(id: Id) -> int:
    return 0 if isinstance(id, bytes) else id[0]
