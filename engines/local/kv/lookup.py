"""What a sequence may start from: the longest prefix of its ids whose K/V is there. Changes nothing.

| on the device: full blocks | and the path's partial tail |
| on the device: full blocks | below it: full blocks, and the path's partial tail |       with tiers
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from engines.local.kv.pool import NO_PAGES, KVPool, Pages, Uids
from engines.local.kv.precision import good_prefix
from engines.local.kv.prefix import NO_PAGE, Node, PrefixIndex
from engines.local.kv.session_cache import KeptBlocks
from engines.local.kv.tiers.exchange import Below, Exchange
from engines.local.sequence import Sequence

NOTHING = Below()


@dataclass(frozen=True, slots=True)
class Match:
    """What a sequence may reuse.

    | pages: full blocks, shared | tail_len slots of `tail_page`, or `below` |
    0                            len(pages) * block_size                     cached
    """

    pages: Pages
    uids: Uids
    node: Node  # of the last full block, or the root
    tail_page: int = 0
    tail_uid: int = 0
    tail_len: int = 0
    in_place: bool = False  # the tail page is free to go on in; otherwise its slots are copied
    below: Below = NOTHING  # what comes up from other tiers, into pages of its own

    def num_tokens(self, block_size: int) -> int:
        return len(self.pages) * block_size + self.tail_len + self.below.num_tokens

    @property
    def taken(self) -> Pages:
        """Pages that it needs a reference to."""
        return np.append(self.pages, np.int32(self.tail_page)) if self.tail_page else self.pages


def block_key(seq: Sequence, block: int, block_size: int) -> bytes:
    """Token bytes of a sequence's block."""
    return seq.tokens[block * block_size : (block + 1) * block_size].tobytes()


@dataclass(frozen=True, slots=True)
class Lookup:
    index: PrefixIndex
    pool: KVPool
    block_size: int
    prefix_reuse: bool
    exchange: Exchange | None

    def match(self, seq: Sequence) -> Match:
        """With bits enough; at least one token is left to run, for its logits."""
        root = self.index.root(seq.salt)
        if not self.prefix_reuse:
            return Match(NO_PAGES, np.empty(0, np.int64), root)
        size, limit = self.block_size, seq.reusable
        hint, common = seq.hint, min(seq.hint_len, limit)
        pages, uids = array("i"), array("q")
        hinted = 0
        if hint is not None:
            hinted = min(len(hint.pages), common // size)
            hinted = self.pool.resident(hint.pages[:hinted], hint.uids[:hinted])
            known = hint.pages[:hinted]
            hinted = good_prefix(self.pool.bits(known), self.pool.lineage[known], seq.min_bits)
        node = root
        if hint is not None and hinted:
            last = self.index.located(int(hint.uids[hinted - 1]))
            assert last is not None, "a named page without a node"
            node = last
        while (found := self.next_page(seq, node, hinted + len(pages))) is not None:
            node = found
            pages.append(found.page)
            uids.append(found.uid)
        all_pages, all_uids = np.array(pages, np.int32), np.array(uids, np.int64)
        if hint is not None and hinted:
            all_pages = np.concatenate((hint.pages[:hinted], all_pages))
            all_uids = np.concatenate((hint.uids[:hinted], all_uids))
        own = seq.preempted or not seq.background  # a session's tail is not for background work to go on in
        tail = self._tail(hint, len(all_pages), common, own) if hint is not None and not pages else None
        if tail is not None and self.pool.good(tail[0], seq.min_bits):
            return Match(all_pages, all_uids, node, *tail)
        if self.exchange is None:
            return Match(all_pages, all_uids, node)
        below = self.exchange.find(seq, node, len(all_pages), own=own)
        return Match(all_pages, all_uids, node, below=below)

    def next_block(self, seq: Sequence, node: Node, block: int) -> Node | None:
        """The node after `node` that block number `block` of `seq` would be, if the index has it."""
        end = (block + 1) * self.block_size
        if end > seq.reusable:
            return None
        return self.index.child(node, block_key(seq, block, self.block_size))

    def next_page(self, seq: Sequence, node: Node, block: int) -> Node | None:
        """The same, if it has a page that is good enough."""
        found = self.next_block(seq, node, block)
        return (
            found if found is not None and found.page != NO_PAGE and self.pool.good(found.page, seq.min_bits) else None
        )

    def next_key(self, seq: Sequence, node: Node, block: int) -> tuple[int, bytes] | None:
        """Name of the block that `seq` needs after `node`; None: it has no full block left that it will publish."""
        end = (block + 1) * self.block_size
        if end > len(seq.tokens) or (seq.ahead_stop and end > seq.ahead_start):
            return None
        return node.uid, block_key(seq, block, self.block_size)

    def _tail(self, hint: KeptBlocks, full: int, common: int, own: bool) -> tuple[int, int, int, bool] | None:
        slots = common - full * self.block_size
        if slots <= 0:
            return None
        if full < len(hint.pages):  # the path is left amid a full block
            page, uid = int(hint.pages[full]), int(hint.uids[full])
            if slots < self.block_size and self.pool.owner[page] == uid and page <= self.pool.total:
                return page, uid, slots, False
        elif hint.tail_len and self.pool.owner[hint.tail_page] == hint.tail_uid:
            slots = min(slots, hint.tail_len)
            alone = own and slots == hint.tail_len and self.pool.ref[hint.tail_page] == 0
            return hint.tail_page, hint.tail_uid, slots, bool(alone)
        return None
