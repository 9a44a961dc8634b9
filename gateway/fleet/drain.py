"""Decisions of a drain: which sessions are worth moving, in which order, where to, and when it is over. Pure.

A session that was idle for t returns within the next H with a chance of about H / (t + H): the longer it is silent, the
longer it will be (a Pareto tail with exponent 1). What moving it saves is that chance times the tokens that its next
turn would have to compute anew elsewhere. Those below a tenth are left: they begin anew, should they come back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.store.replica_records import PinnedSession

HORIZON_S = 600.0  # H
LEAST_CHANCE = 0.1  # of a return within H: a session idle for nine times H
SPREAD = 1.25  # no replica takes more than this times the mean of what was moved
CLOCKS_S = 10.0  # more than clocks of gateways differ
SETTLE_S = 2.5  # every gateway knows of the drain by then


def chance(session: PinnedSession, now: float) -> float:
    """That it returns within HORIZON_S. `now`: seconds since 1970."""
    return HORIZON_S / (max(0.0, now - session.last_used_at) + HORIZON_S)


def worth_moving(sessions: Sequence[PinnedSession], now: float) -> list[PinnedSession]:
    """What saves most comes first."""
    likely = [session for session in sessions if chance(session, now) >= LEAST_CHANCE]
    return sorted(likely, key=lambda s: (-chance(s, now) * (1 + s.path_tokens), s.tenant_id, s.session_id))


def with_room(moved: Mapping[str, int], names: Collection[str]) -> frozenset[str]:
    """Of these replicas those that may take one more session: what is moved is spread, however equal they look."""
    least = min((moved.get(name, 0) for name in names), default=0)
    mean = (sum(moved.get(name, 0) for name in names) + 1) / max(1, len(names))
    most = max(least, SPREAD * mean - 1)
    return frozenset(name for name in names if moved.get(name, 0) <= most)


@dataclass(slots=True)
class Progress:
    """`running`: turns there, of all gateways. `released`: sessions left to begin anew; `failed`: their move failed."""

    sessions_left: int = 0
    moved: int = 0
    released: int = 0
    failed: int = 0
    running: int = 0
    timed_out: bool = False

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Progress:
        """What another worker got to; unknown fields of a newer version are left."""
        return cls(**{name: stored[name] for name in cls.__slots__ if name in stored})


def over(progress: Progress, *, began_at: float, until: float | None, now: float) -> bool:
    """Whether nothing is left to do. Running turns are never cut; past its time a drain waits for none of them. Where
    it began in the future, a clock was set back since."""
    if began_at - CLOCKS_S <= now < began_at + SETTLE_S:
        return False
    if until is not None and now >= until:
        return True
    return progress.sessions_left == 0 and progress.running == 0
