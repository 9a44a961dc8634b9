"""Who runs in the next forward. Knows pages as numbers and no tensors.

A step is foreground (priority 0 and below) as long as such a sequence runs or waits, else background; the two never
share one. So a foreground token costs what it costs alone, and background work waits for as long as there is other:

    foreground step   at most `max_batch_tokens` tokens; background sequences keep their pages while there is room,
                      and are the first to be preempted
    background step   at most `background_chunk` tokens: a foreground prompt that comes waits for one such step

One plan:

    1. decode     one token of each running sequence whose prompt is in; preempts the last in line if pages run out
    2. prefill    chunks of running prompts, in order, into what is left
    3. admission  waiting sequences that fit, in order; one whose next block is being computed by another of this step's
                  kind waits for it, and one that finds blocks which others wrote meanwhile takes them over; one whose
                  blocks a disk is bringing waits for them
    4. drafts     tokens guessed behind the last one of those that decode, where it pays and pages are left
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from engines.local.config import EngineConfig
from engines.local.kv.cache import KVCache
from engines.local.kv.lookup import Match
from engines.local.kv.session_cache import KeptBlocks
from engines.local.sequence import Sequence
from engines.local.speculate import MOST_DRAFTED, draft_length


@dataclass(frozen=True, slots=True)
class Row:
    """`count` tokens of `seq` from `seq.written` on; `samples`: the last of them is the sequence's last.

    A `draft` follows the sequence's last token: ids that may come next, run to see whether they do.
    """

    seq: Sequence
    count: int  # of the draft too
    samples: bool
    draft: array[int] = field(default_factory=lambda: array("I"))

    @property
    def ids(self) -> array[int]:
        start = self.seq.written
        return self.seq.tokens[start : start + self.count - len(self.draft)] + self.draft

    @property
    def num_sampled(self) -> int:
        """Tokens after which one is chosen."""
        return 1 + len(self.draft) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Plan:
    rows: tuple[Row, ...]  # those with one token first
    admitted: tuple[Sequence, ...]


@dataclass(slots=True)
class Scheduler:
    cache: KVCache
    config: EngineConfig
    guess: Callable[[array[int], int], array[int]] | None = None  # a path's ids, most tokens -> those that may follow
    waiting: list[Sequence] = field(default_factory=list)  # in order
    running: list[Sequence] = field(default_factory=list)  # in order
    preemptions: int = 0

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_order)

    def num_waiting(self, *, background: bool) -> int:
        """How many wait before a newcomer: background work before no foreground request."""
        return len(self.waiting) if background else sum(not seq.background for seq in self.waiting)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it is; its pages are the caller's to release or keep."""
        (self.running if seq in self.running else self.waiting).remove(seq)

    def plan(self) -> Plan:
        background = all(seq.background for seq in (*self.running[:1], *self.waiting[:1]))  # both are in order
        limit = self.config.max_batch_tokens
        if background:
            limit = min(limit, self.config.background_chunk)
        rows = self._decode(background)
        budget = limit - len(rows)
        computing: set[tuple[int, bytes]] = set()  # blocks that this forward or a later one of a running prompt writes
        for seq in self._crew(background):
            if seq.remaining > 1:
                self.cache.catch_up(seq)
                budget -= self._chunk(seq, budget, rows, computing)
        admitted = self._admit(background, min(limit, self.config.max_running), budget, rows, computing)
        held = any(self.cache.coming(seq) for seq in self.waiting)
        assert rows or held or not (self.running or self.waiting), "work is waiting and nothing can run"
        if self.guess is not None:
            rows = self._drafted(rows, limit - sum(row.count for row in rows), self.guess)
        return Plan(tuple(sorted(rows, key=_kind)), tuple(admitted))

    def _crew(self, background: bool) -> list[Sequence]:
        """The running sequences of one kind, in order."""
        return [seq for seq in self.running if seq.background == background]

    def _decode(self, background: bool) -> list[Row]:
        rows: list[Row] = []
        for seq in self._crew(background):
            while seq.remaining == 1 and seq in self.running:
                if self.cache.grow(seq, len(seq.tokens)):
                    rows.append(Row(seq, 1, samples=True))
                    break
                self.preempt(self.running[-1])
        return [row for row in rows if row.seq in self.running]

    def _drafted(self, rows: list[Row], most: int, guess: Callable[[array[int], int], array[int]]) -> list[Row]:
        """`rows` with drafts of at most `most` tokens together. Takes no page from anybody who runs."""
        decoding = [row for row in rows if row.count == 1 and row.seq.num_output]
        room = min(most, MOST_DRAFTED - len(decoding))
        drafted: dict[int, Row] = {}
        for row in decoding:
            seq = row.seq
            left = seq.sampling.max_tokens - seq.num_output - 1  # the last token needs no guess
            length = min(draft_length(seq.acceptance.rate, len(decoding)), room, left)
            draft = guess(seq.tokens, length)
            if draft and self.cache.grow(seq, len(seq.tokens) + len(draft)):
                drafted[id(row)] = Row(seq, 1 + len(draft), samples=True, draft=draft)
                room -= len(draft)
            else:
                seq.acceptance.rest()
        return [drafted.get(id(row), row) for row in rows]

    def _chunk(self, seq: Sequence, budget: int, rows: list[Row], computing: set[tuple[int, bytes]]) -> int:
        assert seq.node is not None
        if (key := self.cache.next_key(seq, seq.node, len(seq.uids))) is not None:
            computing.add(key)
        count = min(seq.run_stop - seq.written, budget)
        if count > 0:
            rows.append(Row(seq, count, samples=count == seq.remaining))
        return max(count, 0)

    def _admit(
        self, background: bool, most: int, budget: int, rows: list[Row], computing: set[tuple[int, bytes]]
    ) -> list[Sequence]:
        """Lets sequences of one kind in, until `most` of it run."""
        admitted: list[Sequence] = []
        for seq in tuple(self.waiting):
            if budget <= 0 or seq.background != background:
                break
            crew = self._crew(background)
            if len(crew) >= most and not self._yields_to(seq, rows, crew):
                break
            if self.cache.coming(seq):
                continue
            match = self.cache.match(seq)
            if self.cache.comes(seq, match):
                continue  # it would compute what a disk is bringing
            key = self.cache.next_key(seq, match.node, len(match.pages))
            if self.config.prefix_reuse and key in computing:
                self._remember(seq, match)
                continue
            while not self.cache.admit(seq, match, reserve=self._reserve(background)):
                if not self._yields_to(seq, rows, self.running):
                    return admitted
                match = self.cache.match(seq)
            self.waiting.remove(seq)
            insort(self.running, seq, key=_order)
            if seq.cached_tokens is None:
                seq.cached_tokens = seq.written
                admitted.append(seq)
            budget -= self._chunk(seq, budget, rows, computing)
        return admitted

    def _remember(self, seq: Sequence, match: Match) -> None:
        """Spare the next look a walk over what this one found."""
        found = len(match.pages) * self.cache.block_size
        if found > seq.hint_len and not seq.preempted:
            seq.hint, seq.hint_len = KeptBlocks(match.pages, match.uids), found

    def _reserve(self, background: bool) -> int:
        """Pages that admission leaves for those who run in this step; none if nobody does, so that somebody always
        can."""
        return int(self.config.watermark * self.cache.pool.total) if self._crew(background) else 0

    def _yields_to(self, seq: Sequence, rows: list[Row], among: list[Sequence]) -> bool:
        """Preempt the last of `among` if it is of a later priority than `seq`."""
        if not among or among[-1].priority <= seq.priority:
            return False
        victim = among[-1]
        self.preempt(victim)
        rows[:] = [row for row in rows if row.seq is not victim]
        return True

    def preempt(self, seq: Sequence) -> None:
        """Back to the waiting, with all ids; its pages stay cached as long as nobody needs them."""
        self.running.remove(seq)
        hint_len = seq.exact
        seq.hint = self.cache.keep(seq)
        seq.hint_len, seq.preempted = hint_len, True
        self.preemptions += 1
        insort(self.waiting, seq, key=_order)


def _kind(row: Row) -> int:
    """Decode rows, then those with drafts, then chunks of prompts."""
    return (row.count > 1) + (row.count > 1 + len(row.draft))


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.order
