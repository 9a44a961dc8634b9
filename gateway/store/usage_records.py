"""What the usage ledger holds and is asked, as plain values. Knows no SQL and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

# turn: a turn, of a session or of none; request: completions, embeddings, rerank. The rest is the gateway's own work:
# summary: a model asked for one; prefill: a prefix computed before the turn that needs it
Kind = Literal["turn", "request", "summary", "prefill"]
CLIENTS: tuple[Kind, ...] = ("turn", "request")
OWN: tuple[Kind, ...] = ("summary", "prefill")

DAY_S = 86_400
NAMES = ("tenant", "day", "model", "key", "user", "session")  # what a report may be grouped by
_EPOCH = date(1970, 1, 1)


def day_of(now: float) -> int:
    """Days since 1970, UTC, of an instant in seconds since 1970."""
    return int(now // DAY_S)


def month_of(now: float) -> int:
    """The first day of the instant's month."""
    return (datetime.fromtimestamp(now, UTC).date().replace(day=1) - _EPOCH).days


def month_end(now: float) -> float:
    """The instant at which the next month begins, UTC."""
    first = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + timedelta(days=32)).replace(day=1).timestamp()


def day_text(day: int) -> str:
    """2026-11-30"""
    return (_EPOCH + timedelta(days=day)).isoformat()


def day_number(text: str) -> int:
    """The reverse. Raises ValueError for what is no date written YYYY-MM-DD."""
    if len(text) != len("2026-11-30"):
        raise ValueError(f"{text[:32]!r} is no date: written YYYY-MM-DD")
    return (date.fromisoformat(text) - _EPOCH).days


@dataclass(frozen=True, slots=True)
class Spender:
    """Whose work it is: the key that asked ("" for the gateway's own), and the model that does it."""

    key_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Account:
    """Where something is booked. `session_id` and `user_ref` are "" where there is none, or it was erased."""

    tenant_id: str
    day: int
    key_id: str
    user_ref: str
    session_id: str
    model: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Amount:
    """`prompt` has `cached` in it, as engines and OpenAI count. All may be negative: something taken back."""

    count: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.count + other.count,
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.output + other.output,
        )

    def __neg__(self) -> Amount:
        return Amount(-self.count, -self.prompt, -self.cached, -self.output)

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


def amount_of(usage: Mapping[str, Any]) -> Amount:
    """Of a turn's usage. One that has none of its own (it never reached an engine) is an amount of nothing."""
    numbers = [usage.get(name) or 0 for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
    return Amount(1, *numbers) if any(numbers) else Amount()


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Days from `since` up to, not including, `until`; of one tenant, or of all where `tenant_id` is None.

    `group_by`: of NAMES; `after`: the last group of the page before; `where`: name -> the one value of it.
    """

    tenant_id: str | None
    since: int
    until: int
    group_by: tuple[str, ...] = ("day",)
    where: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str | int, ...] | None = None
    limit: int = 100


@dataclass(frozen=True, slots=True)
class UsageLine:
    """One group. `amounts`: (model, kind) -> how much, so that each model can have its price."""

    group: tuple[str | int, ...]
    amounts: Mapping[tuple[str, str], Amount]

    def total(self, *kinds: str) -> Amount:
        return sum((a for (_, kind), a in self.amounts.items() if kind in kinds), Amount())


@dataclass(frozen=True, slots=True)
class UsagePage:
    lines: tuple[UsageLine, ...]
    more: bool


def unnamed(account: Account) -> Account:
    """The account that keeps the counts of one whose session is erased."""
    return replace(account, session_id="", user_ref="")
