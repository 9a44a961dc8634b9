"""Pool and prefix index as one: what a sequence may start from, where it writes, and what stays when it leaves.

match    longest written prefix          probe: changes nothing (lookup.py)
admit    references, copy, pages         commit of a match, or None and nothing changed
grow     pages for the next tokens       probe and commit in one
advance  a forward has finished: written slots count, full blocks are published
catch_up blocks that others wrote meanwhile, in place of the sequence's own pages
keep     leave, pages stay cached        -> KeptBlocks, for the session or for the sequence's return
release  leave
seal     one unit goes to fewer bits, wherever it is in use
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from torch import Tensor

from engines.blocks import num_blocks
from engines.kv_log import KvLog
from engines.local.kv.eviction import EvictionPolicy
from engines.local.kv.forgotten import Forgotten
from engines.local.kv.lookup import NOTHING, Lookup, Match, block_key
from engines.local.kv.pool import KVPool, PageContents, Pages, Uids
from engines.local.kv.precision import Precision, lineage
from engines.local.kv.prefix import NO_PAGE, Node, PrefixIndex
from engines.local.kv.session_cache import KeptBlocks, SessionPath
from engines.local.kv.shift import Copy, find_copy, slots_of
from engines.local.kv.tiers.exchange import Below, Exchange
from engines.local.kv.tiers.piece import Piece, content_name
from engines.local.kv.tiers.tiers import Tiers
from engines.local.kv.units import Units
from engines.local.sequence import Sequence


class KVCache:
    def __init__(
        self,
        num_pages: int,
        block_size: int,
        contents: PageContents,
        *,
        model: str,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        prefix_reuse: bool = True,
        log: KvLog | None = None,
        attention_tokens: float = math.inf,
        pin_share: float = 0.0,
        units: Units | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """`attention_tokens`: context at which attending costs a token as much as the weights do. `tiers`: where
        evicted blocks go, and may come back from."""
        self.block_size = block_size
        self.index = PrefixIndex(model, log)
        self.pool = KVPool(num_pages, contents, policy, self.index, clock=clock, pin_share=pin_share, units=units)
        self._exchange = Exchange(tiers, self.pool, self.index, block_size) if tiers is not None else None
        self.pool.below = self._exchange
        self._look = Lookup(self.index, self.pool, block_size, prefix_reuse, self._exchange)
        self._attention_tokens = attention_tokens
        self._contents = contents
        self._prefix_reuse = prefix_reuse

    def match(self, seq: Sequence) -> Match:
        """The longest prefix of `seq` that may be reused."""
        return self._look.match(seq)

    def comes(self, seq: Sequence, match: Match) -> bool:
        """Whether more than it matched is on its way to `seq` from a disk; asks for it first."""
        if self._exchange is None or match.tail_page:
            return False
        self._exchange.ask(seq, match.node, len(match.pages), match.below)
        return self._exchange.coming(seq)

    def coming(self, seq: Sequence) -> bool:
        """The same, of what was asked for."""
        return self._exchange is not None and self._exchange.coming(seq)

    def next_key(self, seq: Sequence, node: Node, block: int) -> tuple[int, bytes] | None:
        return self._look.next_key(seq, node, block)

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
        if needed + reserve > self.pool.available(match.taken) and match.tail_page and not match.in_place:
            match = replace(match, tail_page=0, tail_uid=0, tail_len=0)  # the page copied from is one page more
        if needed + reserve + match.below.spare > self.pool.available(match.taken):
            match = replace(match, below=NOTHING)
        taken = match.taken
        if needed + reserve > self.pool.available(taken):
            return False
        self.pool.take(taken, seq.tag)
        last = int(taken[-1]) if len(taken) and (match.in_place or not match.tail_page) else 0
        below, held = self._exchange.take(match.below) if self._exchange is not None else (NOTHING, [])
        units = self._units_for(below, seq.tag)
        fresh = self.pool.allocate(needed - sum(len(pages) for pages in units.values()), seq.tag, after=last)
        assert fresh is not None, "available() promised more than allocate() gave"
        seq.table = array("i", match.pages.tobytes())
        if match.in_place:
            seq.table.append(match.tail_page)
        elif match.tail_page:
            self._contents.copy(match.tail_page, int(fresh[0]), match.tail_len)
            self.pool.release(np.array([match.tail_page], np.int32))
        seq.uids = array("q", match.uids.tobytes())
        seq.node = self.index.hold(match.node)
        seq.written = match.num_tokens(self.block_size) - match.below.num_tokens
        seq.lineage = Precision.FULL
        self._reads(seq, taken)
        left = self._bring(seq, below, held, units, fresh) if held else fresh
        seq.table.frombytes(left.tobytes())
        if seq.preempted and seq.hint is not None and not match.in_place:
            self.drop(seq.hint)
        seq.hint, seq.hint_len, seq.preempted = None, 0, False
        return True

    def _units_for(self, below: Below, tag: int) -> dict[int, Pages]:
        """Pages of a unit for each sealed piece, by its place; none for those after the first that gets none."""
        units: dict[int, Pages] = {}
        for at, found in enumerate(below.found):
            if found.sealed:
                pages = self.pool.allocate_unit(found.piece.precision, tag, found.first, found.count)
                if pages is None:
                    break
                units[at] = pages
        return units

    def _bring(self, seq: Sequence, below: Below, held: list[Tensor], units: dict[int, Pages], fresh: Pages) -> Pages:
        """What lies in other tiers into `units` and the first of the `fresh` pages, as if `seq` had written it -> the
        fresh pages that are left."""
        assert self._exchange is not None
        stop = next((at for at, found in enumerate(below.found) if found.sealed and at not in units), len(held))
        self._exchange.tiers.give(below.pieces[stop:])
        below, pages = Below(below.found[:stop]), list[Pages]()
        for at in range(stop):
            pages.append(units[at] if at in units else fresh[:1])
            fresh = fresh if at in units else fresh[1:]
        self._exchange.bring(below, held[:stop], [int(mine[0]) for mine in pages])
        for found, mine in zip(below.found, pages, strict=True):
            seq.table.frombytes(mine.tobytes())
            for page in mine.tolist():
                self.pool.adopt(page, found.piece.users)
                if not found.piece.partial:
                    self._publish(seq, found.piece.lineage)
            self._reads(seq, mine)
            seq.lineage = min(seq.lineage, found.piece.lineage)
            if found.count < len(found.piece.names):  # what of the unit is not this path's stays with nobody
                self._contents.zero(np.setdiff1d(self.pool.units.pages(self.pool.units.unit(int(mine[0]))), mine))
        seq.written += below.num_tokens
        read = sum(found.num_tokens for found in below.found if found.piece.from_disk)
        seq.host_tokens, seq.disk_tokens = seq.host_tokens + below.num_tokens - read, seq.disk_tokens + read
        return fresh

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
            self._publish(seq, seq.lineage)

    def catch_up(self, seq: Sequence) -> None:
        """Take over the blocks of `seq` that somebody else has written since it came, in place of its own pages."""
        assert seq.node is not None
        if not self._prefix_reuse or seq.ahead_stop:
            return
        while (node := self._look.next_page(seq, seq.node, len(seq.uids))) is not None:
            block = len(seq.uids)
            own, seq.table[block] = seq.table[block], node.page
            self.pool.take(np.array([node.page], np.int32), seq.tag)
            self.pool.release(np.array([own], np.int32))
            self._reads(seq, np.array([node.page], np.int32))
            self._enter(seq, self.index.hold(node))
            seq.written = len(seq.uids) * self.block_size

    def _reads(self, seq: Sequence, pages: Pages) -> None:
        """What `seq` computes from now on is made from `pages` too."""
        seq.lineage = lineage(seq.lineage, self.pool.bits(pages), self.pool.lineage[pages])

    def _enter(self, seq: Sequence, node: Node) -> None:
        """`node`, held, is the sequence's next published block."""
        assert seq.node is not None
        self.index.unhold(seq.node)
        seq.node = node
        seq.uids.append(node.uid)

    def _publish(self, seq: Sequence, lineage: int) -> None:
        assert seq.node is not None
        block = len(seq.uids)
        page = seq.table[block]
        node = self.index.hold(self.index.insert(seq.node, block_key(seq, block, self.block_size)))
        if node.page != page:
            if node.page != NO_PAGE and self.pool.ref[node.page] == 0:
                idle = node.page  # the same content twice: the page in use stays, the idle one goes
                self.index.drop(node.uid)
                self.pool.unname(idle)
            if node.page == NO_PAGE:
                self.index.locate(node, page)
                content, gain = content_name(node.digest), self._gain(block)
                self.pool.name(page, node.uid, content=content, gain=gain, lineage=lineage)
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
            gain = self._gain(full) * slots / self.block_size
            self.pool.name(page, uid, gain=gain, lineage=seq.lineage)
            name = b""
            if self._exchange is not None and seq.node is not None:
                ids = seq.tokens[full * self.block_size : full * self.block_size + slots].tobytes()
                name = self._exchange.name_tail(page, uid, seq.node, ids)
            kept = KeptBlocks(pages, uids, page, uid, slots, name)
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

    def pin(self, seq: Sequence) -> None:
        """Keep the published blocks of its system prompt, or of its whole prompt where nothing is said of that, before
        others, once nobody uses them."""
        tokens = seq.system_tokens or seq.prompt_len
        self.pool.pin(np.array(seq.table[: min(len(seq.uids), tokens // self.block_size)], np.int32))

    def drop(self, blocks: KeptBlocks) -> None:
        """Nobody will come back for these: the partial tail, which only its path can find, becomes free."""
        if blocks.tail_len and self.pool.owner[blocks.tail_page] == blocks.tail_uid:
            self.pool.unname(blocks.tail_page)
        if self._exchange is not None:
            self._exchange.drop(blocks.tail_name)

    # ------------------------------------------------------------------ fewer bits
    def pages_of(self, uids: Uids) -> Pages:
        """Where the blocks of those names are now; 0 for one that is not there."""
        nodes = [self.index.located(uid) for uid in uids.tolist()]
        return np.array([node.page if node is not None else 0 for node in nodes], np.int32)

    def seal(self, pages: Pages, precision: Precision, running: Iterable[Sequence]) -> Pages | None:
        """Take one unit's `pages` to `precision`, between two steps -> its pages from now on, or None and nothing
        changed: there is no room, its content cannot be held, or a running sequence wants more bits."""
        assert bool((self.pool.bits(pages) > precision).all()), "a unit never gets more bits, nor the same again"
        users = [seq for seq in running if len(seq.table) and any(page in seq.table for page in pages.tolist())]
        if any(seq.min_bits > precision for seq in users):
            return None
        uids = self.pool.owner[pages].tolist()
        sealed = self.pool.seal(pages, precision)
        if sealed is None:
            return None
        for uid, page in zip(uids, sealed.tolist(), strict=True):
            node = self.index.located(uid)
            assert node is not None, "a sealed page without a node"
            node.page = page
        for seq in users:
            for old, new in zip(pages.tolist(), sealed.tolist(), strict=True):
                if old in seq.table:
                    seq.table[seq.table.index(old)] = new
            self._reads(seq, sealed)
        return sealed

    def collect(self, path: SessionPath, tag: int) -> list[tuple[Piece, Tensor | None]]:
        """What there is of a kept path, in every tier (exchange.Exchange.collect)."""
        return self._exchange.collect(path, tag) if self._exchange is not None else []

    def names(self, path: SessionPath) -> list[bytes]:
        """Of a kept path's blocks outside, its tail's at last."""
        return [name for name, *_ in self._exchange.names(path)] if self._exchange is not None else []

    def put_down(self, path: SessionPath, tag: int) -> int:
        """Let the device's pages that only this session uses go to host memory -> pages."""
        pages = self.pages_of(path.blocks.uids)
        tail = path.blocks.tail_page if self.pool.owner[path.blocks.tail_page] == path.blocks.tail_uid else 0
        return self.pool.put_down(np.append(pages, np.int32(tail)), tag)

    def let_go(self, tag: int) -> None:
        """Free what only session `tag` uses on the device and in host memory: a file has it."""
        _, uids = self.pool.forget(tag)
        for uid in uids:
            self.index.drop(uid)
        if self._exchange is not None:
            self._exchange.tiers.host.forget(tag)

    def forget(self, tag: int) -> Forgotten:
        """Zero and free every cached page that only session `tag` used, and what lies of it below."""
        freed, uids = self.pool.forget(tag)
        for uid in uids:
            self.index.drop(uid)
        gone = self._exchange.forget(tag) if self._exchange is not None else Forgotten()
        gone.device = freed
        return gone

    def check(self, sequences: list[Sequence]) -> None:
        """Books, tree and tables agree: each page is referenced as often as it stands in a table."""
        self.pool.check()
        owners = self.pool.owner
        self.index.check({page: int(owners[page]) for page in np.flatnonzero(owners).tolist()})
        counted = np.zeros_like(self.pool.ref)
        for seq in sequences:
            np.add.at(counted, np.array(seq.table, np.int32), 1)
        assert bool((counted == self.pool.ref).all()), "references do not match the tables"
        if self._exchange is not None:
            self._exchange.tiers.check()

    def _gain(self, block: int) -> float:
        """Prefill cost of a path's block number `block`, whole, over its bytes; 1 for the first."""
        return 1.0 + block * self.block_size / self._attention_tokens
