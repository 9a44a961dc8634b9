"""Chooses a replica for a turn. Knows no HTTP, no store and no clock but the moment it is given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.fleet.replica import Replica

Reason = Literal["pinned", "least_loaded", "pin_unavailable", "failover"]


@dataclass(frozen=True, slots=True)
class Pin:
    """The replica that ran a session's last turn, and which life of it."""

    replica: str
    epoch: str | None


@dataclass(frozen=True, slots=True)
class Placement:
    replica: Replica
    reason: Reason
    expected_cached_tokens: int

    @property
    def epoch(self) -> str | None:
        """Changes when the replica restarts: what it had cached is gone then."""
        return self.replica.capabilities.epoch if self.replica.capabilities is not None else None

    def as_json(self) -> dict[str, object]:
        return {
            "replica": self.replica.name,
            "reason": self.reason,
            "expected_cached_tokens": self.expected_cached_tokens,
            "epoch": self.epoch,
        }


def choose(
    replicas: Sequence[Replica],
    *,
    model: str,
    pin: Pin | None,
    path_tokens: int,
    now: float,
    tried: Collection[str] = (),
) -> Placement | None:
    """The pinned replica where it can take the turn, else the one with the least work; None where no one can."""
    fit = [r for r in replicas if r.serves(model) and r.available(now) and r.name not in tried]
    if not fit:
        return None
    pinned = next((r for r in fit if pin is not None and r.name == pin.replica), None)
    if pinned is not None and pin is not None:
        alive = pinned.capabilities is not None and pinned.capabilities.epoch == pin.epoch
        return Placement(pinned, "pinned", path_tokens if alive else 0)
    least = min(fit, key=lambda r: (r.in_flight + r.load.waiting, r.name))
    reason: Reason = "failover" if tried else "pin_unavailable" if pin is not None else "least_loaded"
    return Placement(least, reason, 0)
