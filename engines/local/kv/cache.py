"""Pool and prefix index as one: what a sequence may start from, where it writes, and what stays when it leaves.

match    longest written prefix          probe: changes nothing
admit    references, copy, pages         commit of a match, or None and nothing changed
grow     pages for the next tokens       probe and commit in one
advance  a forward has finished: written slots count, full blocks are published
catch_up blocks that others wrote meanwhile, in place of the sequence's own pages
keep     leave, pages stay cached        -> KeptBlocks, for the session or for the sequence's return
release  leave
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import numpy as np

from engines.blocks import num_blocks
from engines.local.kv.eviction import EvictionPolicy
from engines.local.kv.pool import KVPool, PageContents, Pages, Uids
from engines.local.kv.prefix import NO_PAGE, Node, PrefixIndex
from engines.local.kv.session_cache import KeptBlocks
from engines.local.kv.shift import Copy, find_copy, slots_of
from engines.local.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Match:
    """What a sequence may reuse.

    | pages: full blocks, shared | tail_len slots of `tail_page` |
    0                            len(pages) * block_size       cached
    """

    pages: Pages
    uids: Uids
    node: Node  # of the last full block, or the root
    tail_page: int = 0
    tail_uid: int = 0
    tail_len: int = 0
    in_place: bool = False  # the tail page is free to go on in; otherwise its slots are copied

    def num_tokens(self, block_size: int) -> int:
        return len(self.pages) * block_size + self.tail_len


class KVCache:
    def __init__(
        self,
        num_pages: int,
        block_size: int,
        contents: PageContents,
        *,
        model: str,
        policy: EvictionPolicy,
        prefix_reuse: bool = True,
    ) -> None:
        self.block_size = block_size
        self.index = PrefixIndex(model)
        self.pool = KVPool(num_pages, contents, policy, self.index.drop)
        self._contents = contents
        self._prefix_reuse = prefix_reuse

    # ------------------------------------------------------------------ look
    def match(self, seq: Sequence) -> Match:
        """The longest prefix of `seq` whose K/V is there; at least one token is left to run, for its logits."""
        root = self.index.root(seq.salt)
        if not self._prefix_reuse:
            return Match(np.empty(0, np.int32), np.empty(0, np.int64), root)
        size, limit = self.block_size, len(seq.tokens) - 1
        hint, common = seq.hint, min(seq.hint_len, limit)
        pages, uids = array("i"), array("q")
        hinted = 0
        if hint is not None:
            hinted = min(len(hint.pages), common // size)
            hinted = self.pool.resident(hint.pages[:hinted], hint.uids[:hinted])
        node = root
        if hint is not None and hinted:
            last = self.index.located(int(hint.uids[hinted - 1]))
            assert last is not None, "a named page without a node"
            node = last
        while (found := self.next_block(seq, node, hinted + len(pages))) is not None and found.page != NO_PAGE:
            node = found
            pages.append(found.page)
            uids.append(found.uid)
        all_pages, all_uids = np.array(pages, np.int32), np.array(uids, np.int64)
        if hint is not None and hinted:
            all_pages = np.concatenate((hint.pages[:hinted], all_pages))
            all_uids = np.concatenate((hint.uids[:hinted], all_uids))
        own = seq.preempted or not seq.background  # a session's tail is not for background work to go on in
        tail = self._tail(hint, len(all_pages), common, own) if hint is not None and not pages else None
        return Match(all_pages, all_uids, node, *(tail or ()))

    def next_block(self, seq: Sequence, node: Node, block: int) -> Node | None:
        """The node after `node` that block number `block` of `seq` would be, if the index has it."""
        end = (block + 1) * self.block_size
        if end > len(seq.tokens) - 1:
            return None
        return self.index.child(node, self._key(seq, block))

    def next_key(self, seq: Sequence, node: Node, block: int) -> tuple[int, bytes] | None:
        """Name of the block that `seq` needs after `node`; None: it has no full block left that it will publish."""
        end = (block + 1) * self.block_size
        if end > len(seq.tokens) or (seq.ahead_stop and end > seq.ahead_start):
            return None
        return node.uid, self._key(seq, block)

    def _tail(self, hint: KeptBlocks, full: int, common: int, own: bool) -> tuple[int, int, int, bool] | None:
        slots = common - full * self.block_size
        if slots <= 0:
            return None
        if full < len(hint.pages):  # the path is left amid a full block
            page, uid = int(hint.pages[full]), int(hint.uids[full])
            if slots < self.block_size and self.pool.owner[page] == uid:
                return page, uid, slots, False
        elif hint.tail_len and self.pool.owner[hint.tail_page] == hint.tail_uid:
            slots = min(slots, hint.tail_len)
            alone = own and slots == hint.tail_len and self.pool.ref[hint.tail_page] == 0
            return hint.tail_page, hint.tail_uid, slots, bool(alone)
        return None

    # ------------------------------------------------------------------ come
    def admit(self, seq: Sequence, match: Match, *, reserve: int = 0) -> bool:
        """Give `seq` its match and pages for all its tokens, and copy ahead what it may; False and nothing changed if
        fewer than `reserve` pages would be left to give out."""
        copy = self._copy(seq, match)
        if copy is not None:
            self.pool.take(copy.pages, seq.tag)  # they stay until they are copied, whatever is given out
            admitted = self._allot(seq, match, reserve)
            if admitted:
                self._copy_ahead(seq, copy)
            self.pool.release(copy.pages)
            if admitted:
                return True
        return self._allot(seq, match, reserve)

    def _copy(self, seq: Sequence, match: Match) -> Copy | None:
        if seq.moved is None or not self._prefix_reuse:
            return None
        cached = match.num_tokens(self.block_size)
        return find_copy(seq.moved, self.pool, self.block_size, cached=cached, num_tokens=len(seq.tokens))

    def _copy_ahead(self, seq: Sequence, copy: Copy) -> None:
        size, count = self.block_size, copy.stop - copy.start
        source = slots_of(copy.pages, copy.source % size, count, size)
        target = slots_of(np.array(seq.table, np.int32), copy.start, count, size)
        self._contents.move(source, target, copy.source, copy.start)
        seq.ahead_start, seq.ahead_stop = copy.start, copy.stop
        seq.shifted_tokens = max(seq.shifted_tokens, count)
        self._jump(seq)

    def _jump(self, seq: Sequence) -> None:
        assert not seq.ahead_start < seq.written < seq.ahead_stop, "what was copied ahead was overwritten"
        if seq.ahead_stop and seq.written == seq.ahead_start:
            seq.written = seq.ahead_stop

    def _allot(self, seq: Sequence, match: Match, reserve: int) -> bool:
        needed = num_blocks(len(seq.tokens), self.block_size) - len(match.pages) - match.in_place
        if needed + reserve > self.pool.available(_taken(match)) and match.tail_page and not match.in_place:
            match = replace(match, tail_page=0, tail_uid=0, tail_len=0)  # the page copied from is one page more
        taken = _taken(match)
        if needed + reserve > self.pool.available(taken):
            return False
        self.pool.take(taken, seq.tag)
        last = int(taken[-1]) if len(taken) and (match.in_place or not match.tail_page) else 0
        fresh = self.pool.allocate(needed, seq.tag, after=last)
        assert fresh is not None, "available() promised more than allocate() gave"
        seq.table = array("i", match.pages.tobytes())
        if match.in_place:
            seq.table.append(match.tail_page)
        elif match.tail_page:
            self._contents.copy(match.tail_page, int(fresh[0]), match.tail_len)
            self.pool.release(np.array([match.tail_page], np.int32))
        seq.table.frombytes(fresh.tobytes())
        seq.uids = array("q", match.uids.tobytes())
        seq.node = self.index.hold(match.node)
        seq.written = match.num_tokens(self.block_size)
        if seq.preempted and seq.hint is not None and not match.in_place:
            self.drop(seq.hint)
        seq.hint, seq.hint_len, seq.preempted = None, 0, False
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Pages for the first `num_tokens` of `seq`; False and nothing changed when there are too few."""
        missing = num_blocks(num_tokens, self.block_size) - len(seq.table)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing, seq.tag, after=seq.table[-1] if len(seq.table) else 0)
        if pages is None:
            return False
        seq.table.frombytes(pages.tobytes())
        return True

    # ------------------------------------------------------------------ go on
    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """`num_tokens` more of `seq` are written by a finished forward: publish the blocks that are full now."""
        seq.written += num_tokens
        self._jump(seq)
        while (len(seq.uids) + 1) * self.block_size <= seq.exact:
            self._publish(seq)

    def catch_up(self, seq: Sequence) -> None:
        """Take over the blocks of `seq` that somebody else has written since it came, in place of its own pages."""
        assert seq.node is not None
        if not self._prefix_reuse or seq.ahead_stop:
            return
        while (node := self.next_block(seq, seq.node, len(seq.uids))) is not None and node.page != NO_PAGE:
            block = len(seq.uids)
            own, seq.table[block] = seq.table[block], node.page
            self.pool.take(np.array([node.page], np.int32), seq.tag)
            self.pool.release(np.array([own], np.int32))
            self._enter(seq, self.index.hold(node))
            seq.written = len(seq.uids) * self.block_size

    def _enter(self, seq: Sequence, node: Node) -> None:
        """`node`, held, is the sequence's next published block."""
        assert seq.node is not None
        self.index.unhold(seq.node)
        seq.node = node
        seq.uids.append(node.uid)

    def _publish(self, seq: Sequence) -> None:
        assert seq.node is not None
        block = len(seq.uids)
        page = seq.table[block]
        node = self.index.hold(self.index.insert(seq.node, self._key(seq, block)))
        if node.page != page:
            if node.page != NO_PAGE and self.pool.ref[node.page] == 0:
                idle = node.page  # the same content twice: the page in use stays, the idle one goes
                self.index.drop(node.uid)
                self.pool.unname(idle)
            if node.page == NO_PAGE:
                self.index.locate(node, page)
                self.pool.name(page, node.uid)
            elif self.pool.owner[page]:
                self.pool.unname(page)  # it was named as a partial tail, and is a second copy now
        self._enter(seq, node)

    # ------------------------------------------------------------------ leave
    def keep(self, seq: Sequence) -> KeptBlocks:
        """Let go of the pages, but name the partial tail, so that all that is written, and exact, is found again."""
        full, slots = len(seq.uids), seq.exact - len(seq.uids) * self.block_size
        pages = np.array(seq.table[:full], np.int32)
        uids = np.array(seq.uids, np.int64)
        kept = KeptBlocks(pages, uids)
        if slots and self._prefix_reuse:
            uid, page = self.index.new_uid(), seq.table[full]
            self.pool.name(page, uid)
            kept = KeptBlocks(pages, uids, page, uid, slots)
        self.release(seq)
        return kept

    def release(self, seq: Sequence, *, scrub: bool = False) -> None:
        """Let go of the pages; `scrub` zeroes those that are this sequence's alone (a forward left NaN in them)."""
        table = np.array(seq.table, np.int32)
        if scrub:
            own = table[len(seq.uids) :]
            for page in own.tolist():
                if self.pool.ref[page] == 1:
                    self.pool.unname(page)
                    self._contents.zero(np.array([page], np.int32))
        self.pool.release(table)
        self.index.unhold(seq.node if seq.node is not None else self.index.hold(self.index.root(seq.salt)))
        seq.table, seq.uids, seq.node, seq.written = array("i"), array("q"), None, 0
        seq.ahead_start = seq.ahead_stop = 0

    def drop(self, blocks: KeptBlocks) -> None:
        """Nobody will come back for these: the partial tail, which only its path can find, becomes free."""
        if blocks.tail_len and self.pool.owner[blocks.tail_page] == blocks.tail_uid:
            self.pool.unname(blocks.tail_page)

    def forget(self, tag: int) -> int:
        """Zero and free every cached page that only session `tag` used -> pages freed."""
        freed, uids = self.pool.forget(tag)
        for uid in uids:
            self.index.drop(uid)
        return freed

    def check(self, sequences: list[Sequence]) -> None:
        """Books, tree and tables agree: each page is referenced as often as it stands in a table."""
        self.pool.check()
        owners = self.pool.owner
        self.index.check({page: int(owners[page]) for page in np.flatnonzero(owners).tolist()})
        counted = np.zeros_like(self.pool.ref)
        for seq in sequences:
            np.add.at(counted, np.array(seq.table, np.int32), 1)
        assert bool((counted == self.pool.ref).all()), "references do not match the tables"

    def _key(self, seq: Sequence, block: int) -> bytes:
        return seq.tokens[block * self.block_size : (block + 1) * self.block_size].tobytes()


def _taken(match: Match) -> Pages:
    return np.append(match.pages, np.int32(match.tail_page)) if match.tail_page else match.pages
