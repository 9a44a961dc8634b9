"""The default eviction policy: what is worth least to keep goes first, and what that is, it learns.

    worth = chance of return x prefill cost / bytes

A block that has been idle for `t` seconds is used again within the next one with a chance of

    rate / (t + delay)

that is, times until the return are Lomax distributed: even over their logarithm, beyond the delay. Rate and delay
are those of the block's kind: how often it was used, and in which turn of its conversation it was used last. They are
fitted by maximum likelihood, again and again, to how long blocks of the kind have waited, in vain or not. Blocks are
watched after their eviction too, in a bounded history, so what is learned does not depend on what was evicted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.eviction import Groups, Used
from engines.local.kv.history import History, Seen

USES = (1, 2, 3, 4, 5, 7, 11)  # told apart: from so many on
TURNS = 4  # told apart; the last one is "or later"
PARTIAL = len(USES) * TURNS
KINDS = PARTIAL + 1
DELAYS_S = 15.0 * 2.0 ** np.arange(9)  # what the delay may be: 15 s ... 64 min
HORIZON_S = 600.0  # whoever comes later counts as not come
POOLED_RETURNS = 30.0  # so much of what all kinds do together is added to each
LEARN_EVERY = 4096  # uses
FEWEST_RETURNS, MOST_RETURNS = 100, 200_000.0  # learned from; beyond, all is halved: what was long ago fades
STEPS, BINS = 2, 64  # gains are told apart by factors of 2 ** (1 / STEPS), from 2 ** -16 to 2 ** 16

Rates = NDArray[np.float64]


def prior_rates() -> Rates:
    """Before anything is learned: more uses and later turns come back more often, partial blocks hardly."""
    use, turn = np.divmod(np.arange(KINDS), TURNS)
    rates = 0.15 * (1 + use) * (1 + 0.3 * turn)
    rates[PARTIAL] = 0.01
    return np.asarray(rates, np.float64)


class CostAware:
    name = "cost_aware"

    def __init__(self, *, horizon_s: float = HORIZON_S, history: History | None = None) -> None:
        self.horizon_s = horizon_s
        self.rates = prior_rates()
        self.delays_s = np.full(KINDS, 60.0)
        self.learning = True
        self._history = history or History()
        self._returns = np.zeros(KINDS)
        self._exposure = np.zeros((KINDS, len(DELAYS_S)))  # sum of log(1 + t / delay) over all waits
        self._logs = np.zeros((KINDS, len(DELAYS_S)))  # sum of log(t + delay) over the waits that ended in a return
        self._unlearned = 0

    def groups(self, used: Used, now_s: float) -> Groups:
        kinds = np.zeros(len(used.names), np.int64)
        named = np.flatnonzero(used.names)[: self._history.size]
        if len(named):
            seen = self._history.record(used.names[named], now_s)
            kinds[named] = self._mark(seen, used.names[named] < 0)
            if self.learning:
                self._observe(seen, now_s)
        tails = np.flatnonzero(used.names == 0)
        kinds[tails] = kinds[tails - 1] if len(named) else 0  # its session comes back for it as for the block before it
        steps = np.round(STEPS * np.log2(np.maximum(used.gains, 1e-9))).astype(np.int64)
        groups = kinds * BINS + np.clip(steps + BINS // 2, 0, BINS - 1)
        # Who comes back for a page comes back for all before it: none is worth less than what follows it.
        worth = (self.rates[kinds] / self.delays_s[kinds] * used.gains)[::-1]
        most = np.maximum.accumulate(worth)
        best = np.maximum.accumulate(np.where(worth >= most, np.arange(len(worth)), 0))
        return np.asarray(groups[::-1][best][::-1], np.int64)

    def worth(self, group: int, idle_s: float) -> float:
        kind, step = divmod(group, BINS)
        gain = math.exp2((step - BINS // 2) / STEPS)
        return float(self.rates[kind] * gain / (idle_s + self.delays_s[kind]))

    def _mark(self, seen: Seen, partial: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Kinds of a path's blocks. Its turn is one more than that of the last block it shares with a path before."""
        known = seen.uses > 1
        shared = len(known) if bool(known.all()) else int(known.argmin())
        turn = int(seen.turn[:shared].max()) + 1 if shared else 0
        use = np.searchsorted(USES, seen.uses, side="right") - 1
        kinds = np.where(partial, PARTIAL, use * TURNS + min(turn, TURNS - 1))
        self._history.kind[seen.slots] = kinds
        self._history.turn[seen.slots[~known]] = turn
        return np.asarray(kinds, np.int64)

    def _observe(self, seen: Seen, now_s: float) -> None:
        back = seen.kind >= 0
        in_time = back & (seen.idle_s < self.horizon_s)
        self._returns += np.bincount(seen.kind[in_time], minlength=KINDS)
        if bool(back.any()):
            np.add.at(self._logs, seen.kind[in_time], np.log(seen.idle_s[in_time, None] + DELAYS_S))
            self._expose(seen.kind[back], seen.idle_s[back], self._exposure)
        if len(seen.lost_kind):
            self._expose(seen.lost_kind, seen.lost_idle_s, self._exposure)
        self._unlearned += len(seen.slots)
        if self._unlearned >= LEARN_EVERY:
            self._unlearned = 0
            self.learn(now_s)

    def _expose(self, kind: NDArray[np.int64], idle_s: NDArray[np.float64], to: Rates) -> None:
        waited = np.minimum(idle_s, self.horizon_s)
        for column, delay_s in enumerate(DELAYS_S):
            to[:, column] += np.bincount(kind, weights=np.log1p(waited / delay_s), minlength=KINDS)

    def learn(self, now_s: float) -> None:
        """Rates and delays from all that was seen, waits that still last included."""
        total = self._returns.sum()
        if total < FEWEST_RETURNS:
            return
        exposure = self._exposure.copy()
        self._expose(*self._history.waiting(now_s), exposure)
        share = POOLED_RETURNS / total
        returns = (self._returns + share * total)[:, None]
        exposure += share * exposure.sum(axis=0)
        logs = self._logs + share * self._logs.sum(axis=0)
        likelihood = returns * np.log(returns / exposure) - logs
        best, kinds = likelihood.argmax(axis=1), np.arange(KINDS)
        self.rates, self.delays_s = (returns / exposure)[kinds, best], DELAYS_S[best]
        if total > MOST_RETURNS:
            for seen in (self._returns, self._exposure, self._logs):
                seen *= 0.5
