"""Which model stands behind a name: replicas may serve two revisions under one, as in a rolling upgrade. Pure.

A session's path is answered by one model. Where no replica serves that one any more, the path begins anew under another
(its items are rendered and computed from the first token), and the turn says so. An answer never changes in its course.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Who answered so far. `fingerprint` None: neither operator nor engine could tell; it equals no other's."""

    fingerprint: str | None

    def __str__(self) -> str:
        return self.fingerprint or "unknown"
