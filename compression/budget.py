"""How full a window is, and whether it is time to act. Pure arithmetic over token counts."""

from __future__ import annotations

from dataclasses import dataclass

TRIGGER = 0.70  # compact when prompt and answer's reserve pass this share of the window


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
