"""What a session, a tenant or the whole gateway may say of compaction: checked, and made into a Policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compression.budget import TARGET, TRIGGER, Mode, OnOverflow, Policy, Reasoning, Strategy

Ratio = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
LEAST_FALL = 0.85  # of the trigger: a compaction that ends right below it would come again at once


class CompactionFields(BaseModel):
    """Fields that are not named stay as the next wider policy has them: session, tenant, gateway."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    strategy: Strategy | None = Field(
        None,
        description="summarize: old turns become short summaries, written by a model and checked (default). extract: "
        "the same without a model. trim: old turns are left out. off: nothing is done.",
    )
    mode: Mode | None = Field(None, description="auto: by itself, after a turn. manual: only by `compact`.")
    on_overflow: OnOverflow | None = Field(
        None,
        description="What a turn that would not fit brings about. compact: as the strategy says, before the turn "
        "(default). truncate: old turns are left out. error: it is refused with the numbers; nothing of it is saved.",
    )
    trigger_ratio: Ratio | None = Field(
        None, description=f"Share of the window, the answer's reserve included, past which to act ({TRIGGER})."
    )
    target_ratio: Ratio | None = Field(None, description=f"Share of the window to go down to ({TARGET}).")
    keep_first: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Turns at the start that stay whole (1)."
    )
    keep_last: Annotated[int, Field(ge=1, le=100)] | None = Field(
        None, description="Turns at the end that stay whole (3)."
    )
    tokens_per_turn: Annotated[int, Field(ge=8, le=100)] | None = Field(
        None, description="Tokens of a summary for each turn that it replaces (40)."
    )
    reasoning: Reasoning | None = Field(
        None,
        description="Reasoning of old turns. template: as the model's template has it (default). keep: it stays in the "
        "prompt, and in the cache. strip: it is taken out, and the prompt from there on is prefilled again.",
    )
    summariser: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Another served model that writes the summaries. Default: the session's own."
    )

    kv_shift: bool | None = Field(
        None,
        description="Where a turn goes on right after a cut, take the KV of kept turns to their new positions instead "
        "of computing it: sooner, and approximate. Such an answer says so, and an exact prefill follows (false).",
    )

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.trigger_ratio is not None and self.target_ratio is not None and self.target_ratio >= self.trigger_ratio:
            raise ValueError(f"target_ratio {self.target_ratio} must be below trigger_ratio {self.trigger_ratio}")
        return self

    def named(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class CacheFields(BaseModel):
    """What K/V an answer may rest on, at a replica that keeps some with fewer bits (docs/kv-quantization.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    min_bits: Annotated[int, Field(ge=0, le=16)] | None = Field(
        None,
        description="Keys and values with fewer bits, or computed from such, are not reused but computed anew: 16 for "
        "none but full ones, 8 for INT8 and better, 4 or 0 for any (0).",
    )


def min_bits_of(*said: Mapping[str, Any] | None) -> int:
    """Of policies, or what else holds a field `cache`: what the first that names it says, else 0."""
    for fields in said:
        bits = ((fields or {}).get("cache") or {}).get("min_bits")
        if bits is not None:
            return int(bits)
    return 0


FIELDS = frozenset(CompactionFields.model_fields)


def policy_of(*fields: Mapping[str, Any]) -> Policy:
    """The policy that these fields make, the last to name one wins; what is no field of compaction is passed over."""
    named = {name: value for some in fields for name, value in some.items() if name in FIELDS and value is not None}
    policy = Policy(**named)
    if policy.target_ratio <= LEAST_FALL * policy.trigger_ratio:
        return policy
    return Policy(**{**named, "target_ratio": LEAST_FALL * policy.trigger_ratio})
