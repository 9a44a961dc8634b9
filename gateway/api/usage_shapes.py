"""A line of the usage ledger as JSON and as a row of CSV, with what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, Field

from gateway.prices import Price, cost
from gateway.store.usage_records import CLIENTS, OWN, Amount, UsageLine, day_text

NUMBERS = ("turns", "requests", "prompt_tokens", "cached_tokens", "output_tokens", "total_tokens", "cost")
OWN_NUMBERS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost")


class OwnUsage(BaseModel):
    """The gateway's own work: summaries, and prefixes that it had computed before the turns that need them."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None


class UsageShape(BaseModel):
    object: str
    tenant: str | None = None
    day: str | None = None
    model: str | None = None
    key: str | None = None
    user: str | None = None
    session: str | None = None
    turns: int
    requests: int = Field(description="Completions, embeddings and rerank.")
    prompt_tokens: int = Field(description="Cached ones included.")
    cached_tokens: int
    output_tokens: int
    total_tokens: int
    cost: float | None = Field(description="By the price table as it is now; null where a model has no price.")
    own: OwnUsage


class UsageList(BaseModel):
    object: str
    data: list[UsageShape]
    since: str
    until: str
    currency: str
    has_more: bool
    next_cursor: str | None


def line_json(line: UsageLine, names: Sequence[str], prices: Mapping[str, Price]) -> dict[str, Any]:
    own = line.total(*OWN)
    group = (
        (name, day_text(int(value)) if name == "day" else value) for name, value in zip(names, line.group, strict=True)
    )
    told = line.total(*CLIENTS)
    return {
        "object": "usage",
        **{name: value if value != "" else None for name, value in group},
        "turns": line.total("turn").count,
        "requests": line.total("request").count,
        **_tokens(told),
        "total_tokens": told.tokens,
        "cost": _paid(line, CLIENTS, prices),
        "own": {"requests": own.count, **_tokens(own), "cost": _paid(line, OWN, prices)},
    }


def _tokens(amount: Amount) -> dict[str, int]:
    return {"prompt_tokens": amount.prompt, "cached_tokens": amount.cached, "output_tokens": amount.output}


def _paid(line: UsageLine, kinds: Sequence[str], prices: Mapping[str, Price]) -> float | None:
    models: dict[str, Amount] = {}
    for (model, kind), amount in line.amounts.items():
        if kind in kinds:
            models[model] = models.get(model, Amount()) + amount
    paid: Decimal | None = cost(prices, models)
    return None if paid is None else float(paid)


def columns_of(names: Sequence[str]) -> list[str]:
    return [*names, *NUMBERS, *(f"own_{name}" for name in OWN_NUMBERS), "currency"]


def row_of(told: Mapping[str, Any], names: Sequence[str], currency: str) -> list[object]:
    return [
        *(told[name] for name in names),
        *(told[name] for name in NUMBERS),
        *(told["own"][name] for name in OWN_NUMBERS),
        currency,
    ]
