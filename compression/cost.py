"""What a way to shrink a prompt costs and brings, in tokens of prefill. Pure arithmetic.

brings   tokens removed x turns to come x HELD     a cached token is read again by every later answer
costs    what must be prefilled after the first changed block, and the summary call
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Way = Literal["keep", "trim", "elide", "summarize", "extract"]

HELD = 0.15  # of a prefilled token: what a cached one costs a turn (attention over it at each of some 300 decode steps)
DECODED = 6.0  # prefilled tokens that one generated token costs: decode reads all weights for one token a sequence
REQUEST_TOKENS = 160  # of a summary request: the suffix that is prefilled, the rest of the prompt is cached


@dataclass(frozen=True, slots=True)
class Option:
    """`worth` = brings - costs; only an `eligible` one may be taken, `why` says what stands against the others."""

    way: Way
    tokens_after: int
    brings: float
    reprefill_tokens: int
    call_tokens: float
    eligible: bool
    why: str = ""

    @property
    def worth(self) -> float:
        return self.brings - self.reprefill_tokens - self.call_tokens

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*self.__slots__, "worth")}


def price(
    way: Way,
    *,
    tokens_before: int,
    tokens_after: int,
    first_changed: int,
    turns_to_come: int,
    summary_tokens: int = 0,
    block_size: int = 32,
    eligible: bool = True,
    why: str = "",
) -> Option:
    """`first_changed`: tokens before it stay what they are; their whole blocks are not prefilled again."""
    unchanged = way == "keep"
    call = REQUEST_TOKENS + DECODED * summary_tokens if way == "summarize" and summary_tokens else 0.0
    return Option(
        way=way,
        tokens_after=tokens_after,
        brings=(tokens_before - tokens_after) * turns_to_come * HELD,
        reprefill_tokens=0 if unchanged else max(0, tokens_after - first_changed // block_size * block_size),
        call_tokens=call,
        eligible=eligible,
        why=why,
    )


def expected_turns(turns_so_far: int) -> int:
    """Turns to come: as many as there were (a conversation's age is the best guess at its rest), 4 to 40."""
    return min(40, max(4, turns_so_far))


def cheapest(options: Iterable[Option]) -> Option | None:
    """The eligible option that is worth most."""
    return max((option for option in options if option.eligible), key=lambda option: option.worth, default=None)
