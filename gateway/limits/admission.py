"""What one turn holds of its limits, from when it is let through to its end, also over a hand-over of the turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.limits.windows import Taken
from gateway.store.limit_records import Holder


@dataclass(slots=True)
class Admission:
    """`tokens`: what it may use at most. `slots`, `months`: holders that have it among their running turns, and that
    have it in their month."""

    id: str
    tokens: int
    requests: list[Taken] = field(default_factory=list)
    windows: list[Taken] = field(default_factory=list)
    slots: list[Holder] = field(default_factory=list)
    months: list[Holder] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For another gateway, with another clock: what was reserved too much of a minute is not given back there."""
        return {
            "id": self.id,
            "tokens": self.tokens,
            "windows": [[taken.name, taken.amount] for taken in self.windows],
            "slots": [[holder.tenant_id, holder.key_id] for holder in self.slots],
            "months": [[holder.tenant_id, holder.key_id] for holder in self.months],
        }

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> Admission:
        """Raises KeyError, TypeError, ValueError for what is none."""
        return cls(
            str(told["id"]),
            int(told["tokens"]),
            windows=[Taken(str(name), int(amount), 0.0) for name, amount in told["windows"]],
            slots=[Holder(str(tenant), str(key)) for tenant, key in told["slots"]],
            months=[Holder(str(tenant), str(key)) for tenant, key in told["months"]],
        )
