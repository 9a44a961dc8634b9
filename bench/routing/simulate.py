"""Replays a trace under one policy, and counts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.routing.policies import POLICIES
from bench.routing.replicas import SimulatedReplica
from bench.routing.trace import Asked, best, scored

WINDOW_S = 600.0
UTILIZATION = 0.6  # of the replicas together, if two thirds of all prompt tokens had to be computed
DELAY_S = 1.0
LOST = 0.01
SEED = 7


@dataclass(frozen=True, slots=True)
class Seen:
    """`hits` without the first block. `loads`: tokens computed by replica; `windows`: the same by ten minutes."""

    hits: int
    loads: tuple[float, ...]
    windows: tuple[tuple[float, ...], ...]

    @property
    def load_max_over_mean(self) -> float:
        return max_over_mean(self.loads)

    @property
    def window_max_over_mean(self) -> float:
        return max(max_over_mean(window) for window in self.windows)


def max_over_mean(values: Sequence[float]) -> float:
    return max(values) * len(values) / sum(values)


def replay(asked: Sequence[Asked], policy: str, *, replicas: int, capacity: int, seed: int = SEED) -> Seen:
    """The whole trace; the router restarts after half of the time."""
    span_s = asked[-1].at_s - asked[0].at_s or 1.0
    work = sum(request.prompt_tokens * 2 / 3 + request.output_tokens for request in asked)
    rate = work / span_s / replicas / UTILIZATION
    fleet = [
        SimulatedReplica(f"replica-{n}", capacity, rate=rate, random=Random(seed * 1000 + n), lost=LOST)
        for n in range(replicas)
    ]
    router = POLICIES[policy](fleet, Random(seed))
    loads, hits, restarted = [0.0] * replicas, 0, False
    windows: dict[int, list[float]] = {}
    running: list[tuple[float, int, int]] = []  # (done at, number, replica)
    for number, request in enumerate(asked):
        now = request.at_s
        if not restarted and now - asked[0].at_s >= span_s / 2:
            router.restart(now)
            restarted = True
        while running and running[0][0] <= now:
            done_at, ended, at = heapq.heappop(running)
            router.ended(ended, at, asked[ended], done_at)
        chosen = router.choose(number, request, now)
        found, computed, done_at = fleet[chosen].answer(request, delay_s=DELAY_S)
        heapq.heappush(running, (done_at, number, chosen))
        hits += scored(found)
        loads[chosen] += computed
        windows.setdefault(int((now - asked[0].at_s) // WINDOW_S), [0.0] * replicas)[chosen] += computed
    whole = [window for key, window in sorted(windows.items()) if (key + 1) * WINDOW_S <= span_s + WINDOW_S / 2]
    return Seen(hits, tuple(loads), tuple(map(tuple, whole or windows.values())))


def row(
    asked: Sequence[Asked], policy: str, *, replicas: int, capacity: int, reachable: int, infinite: int
) -> dict[str, object]:
    seen = replay(asked, policy, replicas=replicas, capacity=capacity)
    return {
        "policy": policy,
        "replicas": replicas,
        "capacity_blocks": capacity,
        "hit_blocks": seen.hits,
        "hit_over_reachable": round(seen.hits / reachable, 4) if reachable else None,
        "hit_over_infinite": round(seen.hits / infinite, 4) if infinite else None,
        "load_max_over_mean": round(seen.load_max_over_mean, 4),
        "window_max_over_mean": round(seen.window_max_over_mean, 4),
    }


def limits(asked: Sequence[Asked], *, replicas: int, capacity: int) -> tuple[int, int]:
    """Hits of one cache with the capacity of all replicas, and of an infinite one."""
    return best(asked, replicas * capacity), best(asked, None)
