"""What tokens cost: the table of the settings, and the sum for what a ledger's line holds. Plain; knows no store."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gateway.store.usage_records import Amount

MILLION = 1_000_000
EXACT = Decimal("0.000001")  # to which a cost is told

Rate = Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class Price(BaseModel):
    """Of a million tokens, in the settings' currency."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: Rate
    output: Rate
    cached: Rate | None = Field(None, description="Of prompt tokens that were cached. Default: as `prompt`.")

    def of(self, amount: Amount) -> Decimal:
        cached = self.prompt if self.cached is None else self.cached
        paid = (amount.prompt - amount.cached) * self.prompt + amount.cached * cached + amount.output * self.output
        return paid / MILLION


def cost(prices: Mapping[str, Price], amounts: Mapping[str, Amount]) -> Decimal | None:
    """Of an amount for each model. None: some model that was used has no price."""
    used = {model: amount for model, amount in amounts.items() if amount.prompt or amount.output}
    if any(model not in prices for model in used):
        return None
    return sum((prices[model].of(amount) for model, amount in used.items()), Decimal(0)).quantize(EXACT)
