"""Whose fault it is that a replica broke over a request (a 500, another protocol), before anything was answered.

    broke at one replica, and another answers      the replica's
    broke at one, and there is no other to ask     the replica's, as far as anybody knows
    broke at several, and none answers             the request's: it would break whoever takes it

So a request that breaks engines takes no replica out of rotation for everybody else. A lost connection is the replica's
always. Knows no clock but the moment it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engines.contract import EngineError
from gateway.fleet.replica import Replica


@dataclass(slots=True)
class Blame:
    """Of one request. What broke is noted as a failure of its replica once it is known to be one."""

    _broken: list[tuple[Replica, EngineError]] = field(default_factory=list)

    def broke(self, replica: Replica, error: EngineError) -> None:
        self._broken.append((replica, error))

    def settle(self, now: float, *, answered: bool) -> None:
        """`answered`: by some replica, if only its beginning; else there is no other to ask."""
        if answered or len(self._broken) == 1:
            for replica, error in self._broken:
                replica.failed(error, now, lost=False)
        self._broken.clear()
