"""What an answer says of limits: the headers of OpenAI's clients, and those of the IETF's draft (RateLimit fields)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from gateway.limits.windows import MINUTE_S


@dataclass(frozen=True, slots=True)
class Quota:
    """How one limit stands: of the tenant or of the key, whichever is nearer."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class Told:
    """Of one request; filled in when it is let through or refused. `kinds`: "requests", "tokens"."""

    kinds: dict[str, Quota] = field(default_factory=dict)

    def note(self, kind: str, quota: Quota) -> None:
        known = self.kinds.get(kind)
        if known is None or quota.remaining < known.remaining:
            self.kinds[kind] = quota

    def headers(self) -> Iterator[tuple[str, str]]:
        for kind, quota in self.kinds.items():
            yield f"x-ratelimit-limit-{kind}", str(quota.limit)
            yield f"x-ratelimit-remaining-{kind}", str(quota.remaining)
            yield f"x-ratelimit-reset-{kind}", f"{quota.reset_s:.3f}".rstrip("0").rstrip(".") + "s"
        if self.kinds:
            policies = (f'"{kind}";q={quota.limit};w={MINUTE_S}' for kind, quota in self.kinds.items())
            left = (f'"{kind}";r={quota.remaining};t={ceil(quota.reset_s)}' for kind, quota in self.kinds.items())
            yield "ratelimit-policy", ", ".join(policies)
            yield "ratelimit", ", ".join(left)
