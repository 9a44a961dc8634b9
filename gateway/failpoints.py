"""Places where a test can kill the process: TURNKEEP_FAILPOINT=before_finish_commit:3 dies at the third hit.

Unset, a hit costs one comparison. The points that exist are in docs/store.md.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

VARIABLE = "TURNKEEP_FAILPOINT"


class Failpoints:
    """Counts hits of one named point and kills the process, as kill -9 would, when the count is reached."""

    def __init__(self, name: str | None = None, hits: int = 1) -> None:
        self._name = name
        self._left = hits

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Failpoints:
        """Read `name` or `name:N`. Raises ValueError where N is not a positive number."""
        name, _, hits = environ.get(VARIABLE, "").partition(":")
        if not name:
            return cls()
        if hits and not (hits.isdecimal() and int(hits) > 0):
            raise ValueError(f"{VARIABLE}={name}:{hits}: after the colon stands the number of the hit, 1 or more")
        return cls(name, int(hits or 1))

    def hit(self, name: str) -> None:
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
