"""What went of a session that was forgotten, tier by tier. Knows no tiers."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass


@dataclass(slots=True)
class Forgotten:
    """Blocks that are free; those on the disk are gone when the tier's `erasing` is over. `remote`: parts that the
    store removed, once it has; None where there is no store."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: Future[int] | None = None

    @property
    def blocks(self) -> int:
        """In this engine."""
        return self.device + self.host + self.disk

    @property
    def done(self) -> bool:
        return self.remote is None or self.remote.done()

    def told(self) -> dict[str, int]:
        """By tier. Raises OSError where the remote store did not remove it: it may still be there."""
        told = {"device": self.device, "host": self.host, "disk": self.disk}
        return told if self.remote is None else told | {"remote": self.remote.result()}
