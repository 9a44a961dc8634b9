"""What a replica was lately given to do, and what of it is still ahead, in tokens. Knows no clock but what it is told.

What this gateway sends is counted when it is sent; what others send is seen in the replica's KV events. Older work
counts less: by 1/e after five minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

RECENT_S = 300.0
OUTPUT_TOKENS = 256.0  # expected of an answer, until answers were seen
LEARN = 0.05


@dataclass(slots=True)
class Traffic:
    _recent: float = 0.0
    _at: float = 0.0
    _ahead: dict[str, float] = field(default_factory=dict)  # turn -> tokens not yet computed
    output_tokens: float = OUTPUT_TOKENS  # of an answer, the last ones weighing most

    def recent(self, now: float) -> float:
        return self._recent * math.exp(-max(0.0, now - self._at) / RECENT_S)

    def given(self, tokens: float, now: float) -> None:
        self._recent = self.recent(now) + tokens
        self._at = max(now, self._at)

    @property
    def answers(self) -> float:
        """What is still to be generated for the turns that are there."""
        return len(self._ahead) * self.output_tokens

    @property
    def queued(self) -> float:
        return sum(self._ahead.values())

    def sent(self, turn: str, prefill_tokens: float, now: float) -> None:
        """A turn went out, of whose prompt `prefill_tokens` are expected to be computed."""
        self.given(prefill_tokens, now)
        self._ahead[turn] = prefill_tokens + self.output_tokens

    def prefilled(self, turn: str) -> None:
        """Its first token came."""
        if turn in self._ahead:
            self._ahead[turn] = self.output_tokens

    def dropped(self, turn: str) -> None:
        """It is over there, however it ended."""
        self._ahead.pop(turn, None)

    def ended(self, turn: str, output_tokens: int, now: float, *, untold: int) -> None:
        """It is over. `untold`: tokens of its answer that the replica's events have not counted, nor ever will."""
        self._ahead.pop(turn, None)
        self.output_tokens += LEARN * (output_tokens - self.output_tokens)
        self.given(untold, now)
