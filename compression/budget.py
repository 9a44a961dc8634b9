"""How full a window is, when it is time to act, and what a session allows. Pure arithmetic over token counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TRIGGER = 0.70  # compact when prompt and answer's reserve pass this share of the window
TARGET = 0.40  # and go down to this share: freeing only the excess compacts again at every following turn
MIN_GAIN = 0.05  # of the window: less is not worth a broken prefix
LEAST_ANSWER = 16  # an answer shall have a sixteenth of the window at least, or all that it may have
RESERVE_SHARE = 4  # an answer's reserve is at most a quarter of the window
MOST_AHEAD = 8  # a turn to come is taken for an eighth of the window at most
MOST_PER_TURN = 100  # tokens of a summary for each turn it replaces: what a session may ask for at most
BREAKER_FAILURES = 3  # after so many compactions in a row that brought nothing ...
BREAKER_GROWTH = 0.05  # ... the next waits until the prompt has grown by this share of the window

Strategy = Literal["summarize", "extract", "trim", "off"]
OnOverflow = Literal["compact", "truncate", "error"]
Mode = Literal["auto", "manual"]
Reasoning = Literal["template", "keep", "strip"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What a session lets be done with its old turns.

    `mode` manual: only when asked for. `on_overflow`: what a prompt longer than the window brings about. `reasoning`:
    what becomes of old turns' reasoning when they are rendered anew. `summariser`: another model than the session's.
    """

    strategy: Strategy = "summarize"
    mode: Mode = "auto"
    on_overflow: OnOverflow = "compact"
    trigger_ratio: float = TRIGGER
    target_ratio: float = TARGET
    keep_first: int = 1
    keep_last: int = 3
    tokens_per_turn: int = 40  # of a summary, for each turn it replaces
    reasoning: Reasoning = "template"
    summariser: str | None = None
    kv_shift: bool = False  # kept turns' KV may be taken to their new positions, which is approximate


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of one prompt against the window of the model that will read it."""

    window: int
    prompt_tokens: int
    reserve_tokens: int  # what the answer may take
    trigger_ratio: float = TRIGGER

    @property
    def used_ratio(self) -> float:
        return self.prompt_tokens / self.window

    @property
    def headroom_tokens(self) -> int:
        return max(0, self.window - self.prompt_tokens)

    @property
    def fits(self) -> bool:
        """At least one token of answer can be generated."""
        return self.prompt_tokens < self.window

    @property
    def past_trigger(self) -> bool:
        return self.prompt_tokens + self.reserve_tokens > self.trigger_ratio * self.window


def answer_tokens(window: int, prompt_tokens: int, asked: int | None, default: int) -> int:
    """How many tokens the answer may have: what was asked for (or the default), at most what the window has left."""
    return max(0, min(asked if asked is not None else default, window - prompt_tokens))


def answer_reserve(window: int, asked: int | None, default: int) -> int:
    """Tokens that stay free for the answer: what it may take, at most a quarter of the window."""
    return min(asked if asked is not None else default, window // RESERVE_SHARE)


def least_answer(window: int, reserve: int) -> int:
    """Tokens below which an answer has too little room for a turn to begin without a compaction."""
    return min(reserve, window // LEAST_ANSWER)


def pressing(window: int, used_tokens: int, reserve: int, turn_tokens: int) -> bool:
    """Whether the next turn would not fit, if it is as long as the last one: a compaction under way then hears no model
    any more."""
    return used_tokens + reserve + min(turn_tokens, window // MOST_AHEAD) > window


def share(ratio: float, window: int) -> int:
    """That part of the window, in whole tokens: at least none of it and at most all."""
    return int(min(1.0, max(0.0, ratio)) * window)


def least_gain(window: int) -> int:
    """Tokens that a compaction must free to be made at all."""
    return max(1, int(MIN_GAIN * window))


def breaker_open(failures: int, tokens_then: int, tokens_now: int, window: int) -> bool:
    """Whether a session that compacted in vain `failures` times in a row, last at `tokens_then`, is left alone now."""
    return failures >= BREAKER_FAILURES and tokens_now - tokens_then < BREAKER_GROWTH * window
