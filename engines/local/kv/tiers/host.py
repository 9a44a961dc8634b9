"""The host tier: pieces in this process's memory, bounded by bytes. Knows no pages and no requests.

    put     a piece comes down                     the least worth goes further down (`fallen`) until it fits
    find    by name
    take    out of the index, content still there  -> give    its room is free, and holds nothing
    forget  what only that session used is zeroed

Which piece goes first is said by the device pool's own policy: a piece keeps its group and the time of its last use.
One whose followers are here waits for them, so what is left of a path is its beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engines.kv_log import CPU, Block, KvLog
from engines.local.kv.eviction import EvictionPolicy, Used
from engines.local.kv.evictor import Evictor
from engines.local.kv.memory import Reserved
from engines.local.kv.precision import Precision
from engines.local.kv.tiers.piece import Piece, checksum

PAGE = 4096  # room begins on a page of the operating system, so that it can be given back

Fallen = Callable[[Piece, Tensor], None]  # a piece and its content, uint8, read before the call returns


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Room for pieces of one precision: slots first ... first + count - 1, `stride` bytes apart."""

    first: int
    count: int
    nbytes: int
    stride: int
    memory: Reserved

    def content(self, slot: int) -> Tensor:
        start = (slot - self.first) * self.stride
        return self.memory.bytes[start : start + self.nbytes]

    def clear(self, slot: int) -> None:
        start = (slot - self.first) * self.stride
        self.memory.bytes[start : start + self.nbytes] = 0  # the system takes it back on some platforms only
        self.memory.discard(start, start + self.stride)


class HostTier:
    def __init__(
        self,
        capacity: int,
        sizes: Mapping[Precision, int],
        policy: EvictionPolicy,
        *,
        clock: Callable[[], float],
        log: KvLog | None = None,
        fallen: Fallen | None = None,
    ) -> None:
        """At most `capacity` bytes; `sizes`: bytes of a piece by precision. ValueError where none fits."""
        self.capacity = capacity
        self._shelves: dict[Precision, _Shelf] = {}
        self._free: dict[Precision, list[int]] = {}
        after = 1
        for precision, nbytes in sizes.items():
            stride = -(-nbytes // PAGE) * PAGE
            count = capacity // stride
            shelf = _Shelf(after, count, nbytes, stride, Reserved(count * stride))
            self._shelves[precision] = shelf
            self._free[precision] = list(range(after + count - 1, after - 1, -1))
            after += count
        if after == 1:
            raise ValueError(f"host_bytes is {capacity}: the smallest piece takes {min(sizes.values())} bytes")
        self._pieces: dict[int, Piece] = {}  # by slot
        self._slots: dict[bytes, int] = {}  # by name of a block
        self._taken: dict[Piece, int] = {}  # out of the index, not given back yet
        self._followers: Counter[bytes] = Counter()  # pieces here that follow the block of that name
        self._evictor = Evictor(after - 1, policy, leaf=self._leaf, above=self._above)
        self._policy, self._clock, self._log, self.fallen = policy, clock, log, fallen
        self.nbytes = 0
        self.fell = 0  # pieces that went further down, or were lost, since the start

    def __len__(self) -> int:
        """Pieces."""
        return len(self._pieces)

    @property
    def blocks(self) -> int:
        return len(self._slots)

    def pieces(self) -> Iterable[Piece]:
        return self._pieces.values()

    def find(self, name: bytes) -> Piece | None:
        slot = self._slots.get(name)
        return self._pieces[slot] if slot is not None else None

    @property
    def most(self) -> int:
        """Full pages that fit."""
        return self._shelves[Precision.FULL].count

    def appraise(self, pieces: Sequence[Piece]) -> None:
        """Of pieces that nobody here has seen yet: they are as good as used now."""
        now_s = self._clock()
        if pieces:
            names, gains = np.array([piece.content for piece in pieces]), np.array([piece.gain for piece in pieces])
            for piece, group in zip(pieces, self._policy.groups(Used(names, gains), now_s).tolist(), strict=True):
                piece.group, piece.released_s = group, now_s

    def content(self, piece: Piece) -> Tensor:
        """uint8, as it lies there."""
        slot = self._slots[piece.name]
        return self._shelves[piece.precision].content(slot)

    def put(self, piece: Piece, content: Tensor) -> bool:
        """Keep a copy; False where there is no room that could be made."""
        here = self.find(piece.name)
        if here is not None and min(here.precision, here.lineage) >= min(piece.precision, piece.lineage):
            here.users |= piece.users
            self._touch(here, piece)
            return True
        if any(name in self._slots for name in piece.names):
            self._discard_all(piece.names)
        shelf = self._shelves[piece.precision]
        assert len(content) == shelf.nbytes, "a piece of another size"
        if not self._make_room(shelf.stride) or not self._free[piece.precision]:
            return False
        slot = self._free[piece.precision].pop()
        room = shelf.content(slot)
        room.copy_(content)
        piece.crc = checksum(room)
        self._enter(slot, piece)
        self.nbytes += shelf.stride
        return True

    def take(self, piece: Piece) -> Tensor:
        """Out of the index -> its content, until `give`."""
        slot = self._slots[piece.name]
        self._evictor.remove(np.array([slot], np.int32))
        self._leave(slot)
        self._taken[piece] = slot
        return self._shelves[piece.precision].content(slot)

    def give(self, piece: Piece) -> None:
        """What was taken is not wanted here any more."""
        self._clear(self._taken.pop(piece), piece)

    def discard(self, name: bytes) -> None:
        """Drop the piece that holds the block of that name, if there is one."""
        slot = self._slots.get(name)
        if slot is not None:
            piece = self._pieces[slot]
            self._evictor.remove(np.array([slot], np.int32))
            self._leave(slot)
            self._clear(slot, piece)
            self._evictor.reconsider()

    def forget(self, tag: int) -> int:
        """Zero and drop what only that session used -> blocks dropped."""
        gone = 0
        for piece in [piece for piece in self._pieces.values() if tag in piece.users]:
            if piece.forget(tag):
                gone += len(piece.names)
                self.discard(piece.name)
        return gone

    def check(self) -> None:
        """The books agree with themselves."""
        everywhere = {*self._pieces, *self._taken.values()}
        assert len(everywhere) == len(self._pieces) + len(self._taken), "a slot is taken and kept"
        for precision, shelf in self._shelves.items():
            free = self._free[precision]
            used = [slot for slot in everywhere if shelf.first <= slot < shelf.first + shelf.count]
            assert len(set(free)) == len(free), "a slot is free twice"
            assert not set(free) & set(used), "a slot is free and used"
            assert len(free) + len(used) == shelf.count, "a slot was lost"
        strides = [self._shelves[piece.precision].stride for piece in (*self._pieces.values(), *self._taken)]
        assert self.nbytes == sum(strides) <= self.capacity, "bytes miscounted, or over the bound"
        names = {name: slot for slot, piece in self._pieces.items() for name in piece.names}
        assert names == self._slots, "names miscounted"
        followed = Counter(piece.parent for piece in self._pieces.values())
        assert followed == +self._followers, "followers miscounted"
        self._evictor.check()
        assert len(self._evictor) == len(self._pieces), "the evictor misses a piece"

    # ------------------------------------------------------------------ books
    def _enter(self, slot: int, piece: Piece) -> None:
        self._pieces[slot] = piece
        for name in piece.names:
            self._slots[name] = slot
        self._followers[piece.parent] += 1
        self._evictor.add(np.array([slot], np.int32), np.array([piece.group]), piece.released_s)
        if self._log is not None and not piece.partial:
            for name, parent, token_bytes in piece.blocks():
                at_root = piece.salt is not None and parent == piece.parent
                salt = piece.salt if at_root and piece.salt else ""
                self._log.stored(Block(name, None if at_root else parent, token_bytes, salt), CPU)

    def _leave(self, slot: int) -> None:
        piece = self._pieces.pop(slot)
        for name in piece.names:
            del self._slots[name]
            if self._log is not None and not piece.partial:
                self._log.removed(name, CPU)
        self._followers[piece.parent] -= 1
        if not self._followers[piece.parent]:
            del self._followers[piece.parent]

    def _clear(self, slot: int, piece: Piece) -> None:
        shelf = self._shelves[piece.precision]
        shelf.clear(slot)
        self._free[piece.precision].append(slot)
        self.nbytes -= shelf.stride

    def _touch(self, here: Piece, came: Piece) -> None:
        slot = np.array([self._slots[here.name]], np.int32)
        self._evictor.remove(slot)
        here.group, here.released_s = came.group, came.released_s
        self._evictor.add(slot, np.array([here.group]), here.released_s)

    def _discard_all(self, names: Iterable[bytes]) -> None:
        for name in names:
            self.discard(name)

    def _make_room(self, nbytes: int) -> bool:
        while self.nbytes + nbytes > self.capacity:
            if not self._evictor.evict(1, self._clock(), self._fall):
                return False
        return True

    def _fall(self, slot: int) -> None:
        piece = self._pieces[slot]
        self._leave(slot)
        self.fell += 1
        if self.fallen is not None:
            self.fallen(piece, self._shelves[piece.precision].content(slot))
        self._clear(slot, piece)

    def _leaf(self, slot: int) -> bool:
        return not any(name in self._followers for name in self._pieces[slot].names)

    def _above(self, slot: int) -> int:
        return self._slots.get(self._pieces[slot].parent, 0)
