"""What was used lately, by the name of its content: how often, when, in which turn. Bounded: a ring of uses.

    ring   | oldest use ... | a name's former use (empty) | ... latest use |      a use takes the oldest's place

A name stays the same whenever the same content lies in some page, so that a block that was evicted and is computed
again is known. Knows no pages and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIZE = 65_536  # uses remembered; about 45 bytes each, and a dictionary's entry
GAP_WEIGHT = 0.3  # of the last time between two uses in their running mean


@dataclass(frozen=True, slots=True)
class Seen:
    """Of each recorded name what was known, and of the names that were forgotten for them."""

    slots: NDArray[np.int64]  # where they stand now
    uses: NDArray[np.int64]  # this one included
    idle_s: NDArray[np.float64]  # since the use before; nan: it is new
    gap_s: NDArray[np.float64]  # running mean of the times between uses; nan: it is new
    kind: NDArray[np.int64]  # as marked at the use before; -1: it is new
    turn: NDArray[np.int64]  # as marked when it was new
    lost_kind: NDArray[np.int64]
    lost_idle_s: NDArray[np.float64]


class History:
    """`kind` and `turn` are the policy's to mark, by slot."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.kind = np.full(size, -1, np.int64)
        self.turn = np.zeros(size, np.int64)
        self._name = np.zeros(size, np.int64)  # 0: empty
        self._last_s = np.zeros(size)
        self._uses = np.zeros(size, np.int64)
        self._gap_s = np.full(size, np.nan)
        self._slot: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._slot)

    def record(self, names: NDArray[np.int64], now_s: float) -> Seen:
        """One more use of each of `names` (distinct, none 0, at most `size`)."""
        keys = names.tolist()
        old = np.array([self._slot.get(key, -1) for key in keys], np.int64)
        known = old >= 0
        uses = np.where(known, self._uses[old], 0) + 1
        idle_s = np.where(known, np.maximum(now_s - self._last_s[old], 0.0), np.nan)
        mean = np.where(known, self._gap_s[old], np.nan)
        gap_s = np.where(np.isnan(mean), idle_s, mean + GAP_WEIGHT * (idle_s - mean))
        kind = np.where(known, self.kind[old], -1)
        turn = np.where(known, self.turn[old], 0)

        self._name[old[known]] = 0
        slots = (self._next + np.arange(len(keys))) % self.size
        self._next = int(self._next + len(keys)) % self.size
        lost = slots[self._name[slots] != 0]
        for name in self._name[lost].tolist():
            del self._slot[name]
        seen = Seen(slots, uses, idle_s, gap_s, kind, turn, self.kind[lost], now_s - self._last_s[lost])

        self._name[slots], self._last_s[slots], self._uses[slots] = names, now_s, uses
        self._gap_s[slots], self.kind[slots], self.turn[slots] = gap_s, -1, turn
        self._slot.update(zip(keys, slots.tolist(), strict=True))
        return seen

    def waiting(self, now_s: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Kind and idle time of every name that is remembered and has not come back."""
        live = self._name != 0
        return self.kind[live], now_s - self._last_s[live]

    def check(self) -> None:
        live = np.flatnonzero(self._name)
        assert {int(self._name[slot]): int(slot) for slot in live} == self._slot, "the ring and its index disagree"
