"""Prices every replica that could take a turn, and chooses the cheapest. Knows no engine, no store and no clock.

    cost = tokens left to prefill + QUEUE of the work ahead of it + tokens that it pushes out and that will be missed
         + BALANCE of what the replica was lately given above the mean, and all of what is over BOUND

in tokens: waiting costs time, computing again costs the machine. What a replica was given counts with the answers that
are on their way: else turns that share a cached beginning would all be sent where it lies. A pin looks only at what was
done, so that who comes first in a burst moves nobody: a pinned session stays, unless its replica is over the bound and
another one is cheaper even so. Costs that are nearly equal are decided by the ring, so that gateways which know nothing
yet agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.fleet.ring import HashRing

Reason = Literal[
    "pinned",
    "cached",
    "least_cost",
    "ring",
    "pin_unavailable",
    "pin_over_bound",
    "pin_unfit",
    "model_changed",
    "failover",
    "fallback",
]

BALANCE = 0.03  # of a token for each one above the mean: what keeps the replicas even over minutes
BOUND = 1.1  # times the mean of what replicas were lately given
PIN_BOUND = 1.25  # the same for the replica that a session is pinned to
QUEUE = 0.02  # of a token for each one that is still to be computed before it
SAME = 8.0  # tokens of cost that make no difference: half a chunk, so that one cached chunk still decides


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take the turn, in tokens."""

    name: str
    cached: float = 0.0  # of the prompt, believed to be held there
    queued: float = 0.0  # of work ahead: still to be prefilled or generated
    recent: float = 0.0  # of work it was lately given, older work counting less
    loss: float = 0.0  # of other sessions that the prompt pushes out, as far as they are expected back
    answers: float = 0.0  # of the work ahead, what is still to be generated


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: Reason
    cached: int
    costs: dict[str, int]  # by replica


def cheapest(
    candidates: Sequence[Candidate], *, prompt_tokens: int, key: bytes, ring: HashRing, pin: str | None = None
) -> Choice | None:
    """None where there is no candidate. `pin`: the replica of the session's last turn, whether a candidate or not."""
    if not candidates:
        return None
    mean = sum(c.recent for c in candidates) / len(candidates)
    expected = mean + sum(c.answers for c in candidates) / len(candidates)
    costs = {c.name: _cost(c, prompt_tokens, expected) for c in candidates}
    told = {name: round(cost) for name, cost in costs.items()}
    by_name = {c.name: c for c in candidates}
    pinned = by_name.get(pin) if pin is not None else None
    if pinned is not None and not over_bound(pinned.recent, mean, prompt_tokens):
        return Choice(pinned.name, "pinned", round(pinned.cached), told)
    least = min(costs.values())
    near = [name for name, cost in costs.items() if cost <= least + SAME]
    name = near[0] if len(near) == 1 else next(name for name in ring.order(key) if name in near)
    chosen = by_name[name]
    if pinned is not None:
        return Choice(name, "pinned" if chosen is pinned else "pin_over_bound", round(chosen.cached), told)
    if pin is not None:
        reason: Reason = "pin_unavailable"
    elif chosen.cached > 0:
        reason = "cached"
    else:
        reason = "ring" if len(near) > 1 else "least_cost"
    return Choice(name, reason, round(chosen.cached), told)


def over_bound(recent: float, mean: float, prompt_tokens: int) -> bool:
    """Whether a replica was lately given so much that a pinned session leaves it for a cheaper one. All in tokens."""
    return recent > PIN_BOUND * mean + prompt_tokens


def _cost(candidate: Candidate, prompt_tokens: int, mean: float) -> float:
    given = candidate.recent + candidate.answers
    above = max(0.0, given - mean)
    beyond = max(0.0, given - BOUND * mean - prompt_tokens)
    missing = max(0.0, prompt_tokens - candidate.cached)
    return missing + QUEUE * candidate.queued + candidate.loss + BALANCE * above + beyond
