"""Takes units to fewer bits between steps, as the policy says: a few at a time, the least recently used path first.

    a path is kept, a running one has grown, the pool has filled up  -> due
    due -> targets (precision) -> units that have more bits than their target -> sealed, some with each call

Each unit is encoded once for each precision it passes, from what it had before; it never gets more bits again. Knows no
tensors and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from engines.local.kv.cache import KVCache
from engines.local.kv.pool import Pages, Uids
from engines.local.kv.precision import PathShape, Precision, PrecisionPolicy, targets
from engines.local.kv.quant import UNIT
from engines.local.kv.session_cache import SessionCache, SessionPath
from engines.local.sequence import Sequence

Key = tuple[str, str]  # session, salt


@dataclass(slots=True)
class Sealer:
    cache: KVCache
    sessions: SessionCache
    policy: PrecisionPolicy
    window: int
    sealed: int = 0  # units, since the start
    refused: int = 0  # units whose content no codec here can hold, or for which there was no room
    _due: dict[Key, None] = field(default_factory=dict)  # paths to look at, the first first
    _units: deque[tuple[Uids, Precision]] = field(default_factory=deque)  # of the path that is being worked on
    _path: SessionPath | None = None
    _grown: dict[int, tuple[int, int]] = field(default_factory=dict)  # arrival -> units and level when last looked at
    _level: int = 0  # rungs of pressure that have been reached

    @property
    def pending(self) -> bool:
        return bool(self._units or self._due)

    def kept(self, path: SessionPath) -> None:
        """A session has left this path."""
        if self.policy.seals:
            self._due.pop((path.session, path.salt), None)
            self._due[path.session, path.salt] = None

    def work(self, running: Seq[Sequence], most: int) -> None:
        """Seal up to `most` units."""
        if not self.policy.seals:
            return
        self._look(running)
        for _ in range(most):
            while not self._units and self._due:
                self._take_up(next(iter(self._due)))
            if not self._units:
                return
            self._seal(*self._units.popleft(), running)

    def _look(self, running: Seq[Sequence]) -> None:
        level = sum(rung.reached(self.cache.pool.pressure, 1.0) for rung in self.policy.full)
        if level > self._level:  # every path is looked at again, the least recently used first
            self._due = {(path.session, path.salt): None for path in self.sessions}
        self._level = level
        for arrival in self._grown.keys() - {seq.arrival for seq in running}:
            del self._grown[arrival]
        for seq in running:
            now = (len(seq.uids) * self.cache.block_size // UNIT, level)
            if self._grown.get(seq.arrival) != now:
                self._grown[seq.arrival] = now
                starts = (seq.recent_from,) if seq.recent_from else turn_starts(seq.marks, ended=False)
                shape = PathShape(seq.exact, seq.system_tokens, starts, seq.min_bits)
                self._units.extend(self._find(np.array(seq.uids, np.int64), shape))

    def _take_up(self, key: Key) -> None:
        del self._due[key]
        path = self.sessions.get(*key, touch=False)
        if path is None:
            return
        pages = self.cache.pages_of(path.blocks.uids)
        path.blocks = replace(path.blocks, pages=pages)  # where they went when other paths' units were sealed
        self._path = path
        starts = (path.recent_from,) if path.recent_from else turn_starts(path.marks, ended=True)
        shape = PathShape(len(path.ids), path.system_tokens, starts, path.min_bits)
        self._units.extend(self._find(path.blocks.uids, shape))

    def _find(self, uids: Uids, shape: PathShape) -> Iterable[tuple[Uids, Precision]]:
        """Units of a path that have more bits than they should, the oldest first."""
        pool, each = self.cache.pool, UNIT // self.cache.block_size
        usable = pool.units.count.keys()
        wanted = targets(shape, self.policy, window=self.window, pressure=pool.pressure, usable=usable)
        for unit, precision in enumerate(wanted[: len(uids) // each]):
            if precision != Precision.FULL:
                yield uids[unit * each : (unit + 1) * each], precision

    def _seal(self, uids: Uids, precision: Precision, running: Seq[Sequence]) -> None:
        pages = self.cache.pages_of(uids)
        if not self._whole(pages) or int(self.cache.pool.bits(pages).min()) <= precision:
            return
        sealed = self.cache.seal(pages, precision, running)
        if sealed is None:
            self.refused += 1
            return
        self.sealed += 1
        if self._path is not None:
            blocks = self._path.blocks  # its pages are an array of its own, made by `_take_up`
            for uid, page in zip(uids.tolist(), sealed.tolist(), strict=True):
                blocks.pages[blocks.uids == uid] = page

    def _whole(self, pages: Pages) -> bool:
        """Whether the pages are there, and are all full or one unit."""
        units = self.cache.pool.units
        if not bool(pages.all()):
            return False
        if bool((pages <= units.num_pages).all()):
            return True
        first = int(pages.min())
        return first > units.num_pages and bool((pages == units.pages(units.unit(first))).all())


def turn_starts(marks: Iterable[int], *, ended: bool) -> tuple[int, ...]:
    """Where the turns of a path begin, ascending. `marks` lie at the end of each prompt and of each answer; the last is
    an answer's where the path has `ended`."""
    lengths = sorted(marks)
    answers = lengths[::-1][2::2] if ended else lengths[::-1][1::2]
    return (0, *reversed(answers))
