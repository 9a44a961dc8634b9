"""Between the device pool and the tiers below it: what an evicted page is called down there, and what an admitted path
finds there. Knows the index and the books; no tensors.

    evicted page   -> its node's name, or that of the partial tail  -> Piece -> Tiers
    admitted path  | on the device | found below: full blocks, the tail of the session's path | to be computed |
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from engines.blocks import block_digest
from engines.local.kv.forgotten import Forgotten
from engines.local.kv.pool import KVPool
from engines.local.kv.precision import Precision
from engines.local.kv.prefix import NO_PAGE, Node, PrefixIndex
from engines.local.kv.session_cache import SessionPath
from engines.local.kv.tiers.disk import PATIENCE_S, Fetch
from engines.local.kv.tiers.piece import ID_BYTES, Piece
from engines.local.kv.tiers.tiers import Tiers
from engines.local.sequence import Sequence

NOTHING_COMES = Fetch(0.0, coming=False, done=True)


@dataclass(frozen=True, slots=True)
class Found:
    """Of a piece the blocks first ... first + count - 1; `num_tokens` of them are taken."""

    piece: Piece
    first: int
    count: int
    num_tokens: int

    @property
    def sealed(self) -> bool:
        return self.piece.precision < Precision.FULL


@dataclass(frozen=True, slots=True)
class Below:
    """What a path finds below the device, after what it finds there."""

    found: tuple[Found, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(found.num_tokens for found in self.found)

    @property
    def pieces(self) -> list[Piece]:
        return [found.piece for found in self.found]

    @property
    def spare(self) -> int:
        """Pages that may be needed besides one for each block: a unit of which not every block is taken may take more
        than the pages it stands for, and what units take is rounded up."""
        sealed = [found for found in self.found if found.sealed]
        return sum(found.count < len(found.piece.names) for found in sealed) + bool(sealed)


@dataclass(frozen=True, slots=True)
class _Tail:
    """What the partial tail in a page is called."""

    uid: int
    piece: Piece


class Exchange:
    def __init__(self, tiers: Tiers, pool: KVPool, index: PrefixIndex, block_size: int) -> None:
        self.tiers = tiers
        self._pool, self._index, self._block_size = pool, index, block_size
        self._tails: dict[int, _Tail] = {}  # by page
        self._pages: list[int] = []  # that are going
        self._pieces: list[Piece] = []  # what they hold

    # ------------------------------------------------------------------ down
    def name_tail(self, page: int, uid: int, after: Node, token_bytes: bytes) -> bytes:
        """A path is kept whose last, partial block lies in `page` under `uid` -> its name outside."""
        name = block_digest(after.digest, token_bytes)
        piece = Piece((name,), after.digest, token_bytes, _salt(after), partial=True)
        self._tails[page] = _Tail(uid, piece)
        return name

    def going(self, page: int) -> None:
        """Cached `page` is about to be given to somebody else; its books still stand."""
        piece = self._piece(page)
        if piece is not None:
            self._pages.append(page)
            self._pieces.append(piece)

    def gone(self) -> None:
        """Those that were going have left the books; their content is still there."""
        pages, pieces = self._pages, self._pieces
        self._pages, self._pieces = [], []
        full = [at for at, page in enumerate(pages) if page <= self._pool.total]
        self.tiers.demote([pieces[at] for at in full], np.array([pages[at] for at in full], np.int32))
        for page, piece in zip(pages, pieces, strict=True):
            if page > self._pool.total:
                self.tiers.demote_unit(piece, page)

    def _piece(self, page: int) -> Piece | None:
        pool = self._pool
        if page > pool.total:
            return self._unit(page)
        uid = int(pool.owner[page])
        node = self._index.located(uid)
        if node is not None:
            piece = _named([node])
        else:
            tail = self._tails.pop(page, None)
            if tail is None or tail.uid != uid:
                return None
            piece = tail.piece
        return self._with_standing(piece, [page])

    def _unit(self, page: int) -> Piece | None:
        """The unit of a sealed page, whole; None where it has gone down already, with another of its pages."""
        pool = self._pool
        pages = pool.units.pages(pool.units.unit(page)).tolist()
        nodes = [self._index.located(int(pool.owner[one])) for one in pages]
        here = [node for node in nodes if node is not None]
        if len(here) < len(nodes) or any(self.tiers.find(node.digest) is not None for node in here):
            return None
        piece = _named(here)
        piece.precision = Precision(int(pool.units.bits[page]))
        if any(going.names == piece.names for going in self._pieces):
            return None
        return self._with_standing(piece, pages)

    def _with_standing(self, piece: Piece, pages: list[int]) -> Piece:
        pool = self._pool
        piece.lineage = int(pool.lineage[pages].min())
        piece.users = {user for page in pages for user in (int(pool.tag[page]), *pool.users.get(page, ()))}
        piece.group, piece.released_s, piece.gain = pool.standing(pages[-1])
        return piece

    # ------------------------------------------------------------------ up
    def find(self, seq: Sequence, node: Node, block: int, *, own: bool) -> Below:
        """What `seq` finds below from its block number `block` on, which comes after `node`. `own`: its path is its
        session's, so that the path's tail may go."""
        size, limit = self._block_size, seq.reusable
        found: list[Found] = []
        name = node.digest
        above: Node | None = node
        while (block + 1) * size <= limit:
            key = seq.tokens[block * size : (block + 1) * size].tobytes()
            above = self._index.child(above, key) if above is not None else None
            if above is not None and above.page != NO_PAGE:
                break  # it is on the device, and was not good enough
            below = block_digest(name, key)
            last = found[-1] if found else None
            if last is not None and below in last.piece.names[last.first + last.count :]:
                found[-1] = replace(last, count=last.count + 1, num_tokens=last.num_tokens + size)
            else:
                piece = self.tiers.find(below)
                first = piece.begins(below, name, key) if piece is not None else None
                if piece is None or first is None or not piece.good(seq.min_bits) or piece.partial:
                    break
                found.append(Found(piece, first, 1, size))
            name, block = below, block + 1
        tail = self._tail(seq, name, block) if own else None
        return Below((*found, *((tail,) if tail is not None else ())))

    def _tail(self, seq: Sequence, name: bytes, block: int) -> Found | None:
        hint, start = seq.hint, block * self._block_size
        if hint is None or not hint.tail_name or block != len(hint.uids):
            return None
        slots = min(seq.hint_len, seq.reusable, start + hint.tail_len) - start
        tail = self.tiers.find(hint.tail_name) if slots > 0 else None
        if tail is None or tail.parent != name or not tail.good(seq.min_bits):
            return None
        ids = seq.tokens[start : start + slots].tobytes()
        return Found(tail, 0, 1, slots) if tail.token_bytes[: slots * ID_BYTES] == ids else None

    def ask(self, seq: Sequence, node: Node, block: int, found: Below) -> None:
        """Have the disk bring what it has of `seq` from its block number `block` on, after `node`; once. `found`: what
        is there already."""
        if seq.fetch is None and self.tiers.disk is not None:
            names = self._on_disk(seq, node, block)[: max(self.tiers.host.most - len(found.found), 0)]
            seq.fetch = self.tiers.fetch(names) if names else NOTHING_COMES

    def coming(self, seq: Sequence) -> bool:
        """Whether the disk still brings something for it: not for longer than PATIENCE_S."""
        fetch, disk = seq.fetch, self.tiers.disk
        return fetch is not None and not fetch.done and disk is not None and disk.now_s - fetch.asked_s < PATIENCE_S

    def _on_disk(self, seq: Sequence, node: Node, block: int) -> list[bytes]:
        """Names of what lies on the disk only."""
        size, limit = self._block_size, seq.reusable
        names: list[bytes] = []
        name = node.digest
        while (block + 1) * size <= limit:
            below = block_digest(name, seq.tokens[block * size : (block + 1) * size].tobytes())
            if self.tiers.on_disk(below) and self.tiers.find(below) is None:
                names.append(below)
            elif self.tiers.find(below) is None:
                break
            name, block = below, block + 1
        hint = seq.hint
        if hint is not None and hint.tail_name and block == len(hint.uids) and self.tiers.find(hint.tail_name) is None:
            names += [hint.tail_name] if self.tiers.on_disk(hint.tail_name) else []
        return names

    def take(self, below: Below) -> tuple[Below, list[Tensor]]:
        """Keep the pieces from going further down while pages are made free for them -> those that are whole, from the
        first on, and their contents."""
        held = self.tiers.take(below.pieces)
        return Below(below.found[: len(held)]), held

    def bring(self, below: Below, held: Seq[Tensor], pages: Seq[int]) -> None:
        """Copy the pieces, and let go of them. `pages`: of each the first that is its own."""
        full = [at for at, found in enumerate(below.found) if not found.sealed]
        where = np.array([pages[at] for at in full], np.int32)
        self.tiers.promote([below.found[at].piece for at in full], [held[at] for at in full], where)
        for found, content, page in zip(below.found, held, pages, strict=True):
            if found.sealed:
                self.tiers.promote_unit(content, page)
            tokens = found.num_tokens
            self.tiers.counts.from_disk += tokens * found.piece.from_disk
            self.tiers.counts.from_host += tokens * (not found.piece.from_disk)
        self.tiers.give(below.pieces)

    # ------------------------------------------------------------------ a session as a whole
    def names(self, path: SessionPath) -> Iterator[tuple[bytes, bytes, bytes]]:
        """(name, name of the one before, token bytes) of a path's full blocks, and at last of its tail."""
        size = self._block_size
        root = self._index.root(path.salt)
        name, count = root.digest, len(path.blocks.uids)
        self._index.unhold(self._index.hold(root))
        for block in range(count + 1):
            ids = path.ids[block * size : block * size + (size if block < count else path.blocks.tail_len)].tobytes()
            if ids:
                above, name = name, block_digest(name, ids)
                yield name, above, ids

    def collect(self, path: SessionPath, tag: int) -> list[tuple[Piece, Tensor | None]]:
        """A path's pieces and their contents, up to the first that is nowhere; None for what lies on the disk only."""
        found: list[tuple[Piece, Tensor | None]] = []
        names = list(self.names(path))
        full = len(path.blocks.uids)
        nodes = self._nodes(path.salt, [ids for _, _, ids in names[:full]])
        at = 0
        while at < len(names):
            piece, content = self._lying(path, names, nodes, at)
            if piece is None:
                break
            found.append((replace(piece, users={tag}), content))
            at += len(piece.names)
        return found

    def _lying(
        self, path: SessionPath, names: list[tuple[bytes, bytes, bytes]], nodes: list[Node | None], at: int
    ) -> tuple[Piece | None, Tensor | None]:
        """The piece that begins with a path's block number `at`, and its content; None: it lies on the disk only."""
        pool, (name, above, ids) = self._pool, names[at]
        partial = at == len(nodes)
        page = self._tail_page(path) if partial else self._page(nodes[at])
        if 0 < page <= pool.total:
            piece = Piece((name,), above, ids, path.salt if at == 0 else None, partial=partial)
            piece.lineage, piece.gain = int(pool.lineage[page]), pool.standing(page)[2]
            return piece, self.tiers.pack([piece], np.array([page], np.int32))[0]
        if page:
            pages = pool.units.pages(pool.units.unit(page)).tolist()
            here = [node for node in nodes[at : at + len(pages)] if node is not None]
            if [node.page for node in here] != pages:
                return None, None  # it is entered amid, or left before its end
            piece = _named(here)
            piece.precision, piece.lineage = Precision(int(pool.units.bits[page])), int(pool.lineage[pages].min())
            return piece, self.tiers.contents.pack_unit(page).clone()
        wanted = [one for one, *_ in names]
        if (here_below := self.tiers.find(name)) is not None and _all_of(here_below, wanted, at):
            return here_below, self.tiers.host.content(here_below).clone()
        lying = self.tiers.disk.find(name) if self.tiers.disk is not None else None
        return (lying, None) if lying is not None and _all_of(lying, wanted, at) else (None, None)

    def _nodes(self, salt: str, keys: list[bytes]) -> list[Node | None]:
        node: Node | None = self._index.root(salt)
        nodes: list[Node | None] = []
        for key in keys:
            node = self._index.child(node, key) if node is not None else None
            nodes.append(node)
        return nodes

    def _page(self, node: Node | None) -> int:
        """Of a block, 0 if there is none."""
        return node.page if node is not None and node.page != NO_PAGE else 0

    def _tail_page(self, path: SessionPath) -> int:
        blocks = path.blocks
        return blocks.tail_page if self._pool.owner[blocks.tail_page] == blocks.tail_uid else 0

    # ------------------------------------------------------------------ away
    def drop(self, tail_name: bytes) -> None:
        """Nobody comes back for that tail."""
        if tail_name:
            self.tiers.host.discard(tail_name)

    def forget(self, tag: int) -> Forgotten:
        """What only session `tag` used goes from every tier."""
        self._tails = {page: tail for page, tail in self._tails.items() if self._pool.owner[page] == tail.uid}
        return self.tiers.forget(tag)


def _named(nodes: Seq[Node]) -> Piece:
    """What lies in the pages of blocks that follow one another."""
    parent = nodes[0].parent
    assert parent is not None
    ids = b"".join(node.key for node in nodes)
    return Piece(tuple(node.digest for node in nodes), parent.digest, ids, _salt(parent))


def _all_of(piece: Piece, names: Seq[bytes], at: int) -> bool:
    """Whether a path goes on with the whole piece at its block number `at`."""
    return list(piece.names) == list(names[at : at + len(piece.names)])


def _salt(parent: Node) -> str | None:
    """Of the root that a block after `parent` begins a path at; None amid a path."""
    return parent.key.decode() if parent.parent is None else None
