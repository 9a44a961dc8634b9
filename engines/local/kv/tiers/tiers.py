"""The tiers below the device pool as one: where a piece lies, how it comes down and goes up. Knows no requests.

    device pool --evicts--> host memory --no room--> disk --no room--> lost
        ^                    |      ^                  |
        '---- admission -----'      '----- fetch ------'

Copies between device and host run within a step; nothing here waits for a disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engines.local.kv.forgotten import Forgotten
from engines.local.kv.pool import Pages
from engines.local.kv.tiers.disk import DiskTier, Fetch
from engines.local.kv.tiers.host import HostTier
from engines.local.kv.tiers.piece import Piece, checksum
from engines.local.kv.tiers.remote import RemoteTier

AT_ONCE = 16  # pages packed or unpacked together: bounds what a copy takes besides


class Packing(Protocol):
    """The tensors of the pool, as far as tiers need them (storage.KVStorage)."""

    def pack(self, pages: Pages) -> Tensor:
        """Content of full pages, uint8 [pages, page bytes], on the CPU."""
        ...

    def unpack(self, packed: Tensor, pages: Pages) -> None:
        """The inverse."""
        ...

    def pack_unit(self, page: int) -> Tensor:
        """Codes and metadata of the unit that sealed `page` belongs to, uint8 [unit bytes], on the CPU."""
        ...

    def unpack_unit(self, packed: Tensor, page: int) -> None:
        """The inverse."""
        ...

    def blank(self, packed: Tensor, num_slots: int) -> None:
        """Zero one packed page, uint8 [page bytes], from slot `num_slots` on: others may have written there."""
        ...


@dataclass(slots=True)
class TierCounts:
    """Since the start. Tokens, but for `lost` and `damaged`: pieces."""

    demoted: int = 0
    from_host: int = 0
    from_disk: int = 0
    lost: int = 0  # that came down and found no room
    damaged: int = 0  # that were not what had been written


@dataclass(slots=True)
class Tiers:
    host: HostTier
    contents: Packing
    disk: DiskTier | None = None
    remote: RemoteTier | None = None  # behind a disk
    counts: TierCounts = field(default_factory=TierCounts)
    _fetches: list[Fetch] = field(default_factory=list)
    _staging: Tensor | None = None

    def __post_init__(self) -> None:
        if self.disk is not None:
            self.host.fallen = self._fall

    # ------------------------------------------------------------------ down
    def demote(self, pieces: Sequence[Piece], pages: Pages) -> None:
        """Keep what lies in full `pages`, one piece each."""
        for at in range(0, len(pieces), AT_ONCE):
            some = pieces[at : at + AT_ONCE]
            for piece, content in zip(some, self.pack(some, pages[at : at + AT_ONCE]), strict=True):
                self._keep(piece, content)

    def demote_unit(self, piece: Piece, page: int) -> None:
        """Keep the unit that sealed `page` belongs to, as it is."""
        self._keep(piece, self.contents.pack_unit(page))

    def _keep(self, piece: Piece, content: Tensor) -> None:
        if self.host.put(piece, content):
            self.counts.demoted += piece.num_tokens
        else:
            self.counts.lost += 1

    def pack(self, pieces: Sequence[Piece], pages: Pages) -> Tensor:
        """What lies in full `pages`, uint8 [pages, page bytes]: of each what its piece names, and nothing else."""
        packed = self.contents.pack(pages)
        for piece, content in zip(pieces, packed, strict=True):
            if piece.partial:
                self.contents.blank(content, piece.num_tokens)
        return packed

    def _fall(self, piece: Piece, content: Tensor) -> None:
        assert self.disk is not None
        if not self.disk.offer(piece, content):
            self.counts.lost += 1

    # ------------------------------------------------------------------ up
    def find(self, name: bytes) -> Piece | None:
        """In host memory: what can go up now."""
        return self.host.find(name)

    def on_disk(self, name: bytes) -> bool:
        return self.disk is not None and name in self.disk

    def fetch(self, names: Sequence[bytes]) -> Fetch:
        """Bring these, which are on the disk, to host memory. `done` once they are there, as far as they could be."""
        assert self.disk is not None
        fetch = self.disk.fetch(names)
        self._fetches.append(fetch)
        return fetch

    def poll(self) -> None:
        """Between two steps: what the disk's threads have done takes effect."""
        if self.disk is None:
            return
        if self.remote is not None:
            self.remote.poll()
        self.disk.poll()
        for fetch in [fetch for fetch in self._fetches if not fetch.coming]:
            self._fetches.remove(fetch)
            self.host.appraise([piece for piece, _ in fetch.found])
            for piece, content in fetch.found:
                piece.from_disk = True
                self.host.put(piece, content)
            fetch.found, fetch.done = [], True

    @property
    def pending(self) -> bool:
        """`poll` is to be called again, though there may be nothing else to do."""
        remote = self.remote is not None and bool(self.remote.running)
        return remote or (self.disk is not None and (self.disk.pending or bool(self._fetches)))

    def idle(self, timeout_s: float) -> None:
        """There was nothing else to do: write what was gathered, and wait until a thread has done something."""
        if self.disk is not None:
            self.disk.flush()
            self.disk.wait(timeout_s, self.remote.running if self.remote is not None else ())

    def take(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Keep the pieces where they are until `give` -> their contents, up to the first that is not what was
        written."""
        held = [self.host.take(piece) for piece in pieces]
        for whole, (piece, content) in enumerate(zip(pieces, held, strict=True)):
            if checksum(content) != piece.crc:
                self.counts.damaged += 1
                self.give(pieces[whole:])
                return held[:whole]
        return held

    def promote(self, pieces: Sequence[Piece], held: Sequence[Tensor], pages: Pages) -> None:
        """Write what was taken, full pages, to `pages`."""
        for at in range(0, len(pieces), AT_ONCE):
            some = list(held[at : at + AT_ONCE])
            if self._staging is None:  # memory that is there already is quicker to copy to
                self._staging = torch.empty(AT_ONCE, len(some[0]), dtype=torch.uint8)
            packed = torch.stack(some, out=self._staging[: len(some)])
            self.contents.unpack(packed, pages[at : at + AT_ONCE])

    def promote_unit(self, held: Tensor, page: int) -> None:
        """Write a unit that was taken to the one that sealed `page` belongs to."""
        self.contents.unpack_unit(held, page)

    def give(self, pieces: Sequence[Piece]) -> None:
        """What was taken is not wanted here any more."""
        for piece in pieces:
            self.host.give(piece)

    # ------------------------------------------------------------------ away
    def forget(self, tag: int) -> Forgotten:
        """What only session `tag` used goes from every tier; from the disk when `erasing` is over."""
        for fetch in self._fetches:
            kept = [(piece, content, piece.forget(tag)) for piece, content in fetch.found]
            for _, content, gone in kept:
                if gone:
                    content.zero_()
            fetch.found = [(piece, content) for piece, content, gone in kept if not gone]
        if self._staging is not None:
            self._staging.zero_()  # what went up last may have been that session's
        return Forgotten(
            host=self.host.forget(tag),
            disk=self.disk.forget(tag) if self.disk is not None else 0,
            remote=self.remote.remove(tag) if self.remote is not None else None,
        )

    @property
    def stuck(self) -> int:
        """Files that hold what was forgotten and could not be removed; the next `forget` tries again."""
        return self.disk.stuck if self.disk is not None else 0

    @property
    def erasing(self) -> bool:
        remote = self.remote is not None and self.remote.erasing
        return remote or (self.disk is not None and self.disk.erasing)

    def check(self) -> None:
        self.host.check()
        if self.disk is not None:
            self.disk.check()
