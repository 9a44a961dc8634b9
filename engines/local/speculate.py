"""Which ids may come next, guessed from the path itself (prompt lookup; A. Saxena, 2023), and when guessing pays.

A guess (a draft) is run behind the sequence's last token in the same forward. After each of its tokens the request's
own chooser draws as ever; as long as it draws what was guessed, the next one is there already:

    tokens   | path             | last |            draft  d1 d2 d3
    forward                       last   d1  d2  d3
    chosen                        d1     d2  x                        d1, d2 are right, x is the next token

So the answer is the one that would have come without, token for token and draw for draw (for a guess that is certain of
itself, rejection sampling is just that). Plain functions and numbers; knows no model and no pages.

When it pays. A step costs as much as reading the weights, and one more for each token; in units of a token:

    cost of a step with n tokens      WEIGHTS + n
    one more guessed token            costs 1, and with probability p saves one of `batch` tokens of a step
    it pays where                     p > batch / (batch + WEIGHTS)
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np

CHOICES = ("auto", "lookup", "off")
WEIGHTS = 5.0  # tokens: reading the weights over computing one token (bench of the compiled decoder, docs/log.md)
MOST = 8  # tokens of a draft
MOST_DRAFTED = 32  # tokens of a step, drafts and those that they follow: what the compiled decoder takes at once
LONGEST, SHORTEST = 4, 2  # ids of the path's end that are looked for in it
SEARCHED = 32_768  # ids back: bounds a step's search to some 100 us
MEMORY = 0.8  # weight of what was seen before, by draft
RECOVERY = 0.03  # by token without a draft: some 30 of them, and it is tried again


@dataclass(slots=True)
class Acceptance:
    """How often the guesses of one sequence were right of late; it starts undecided."""

    right: float = 1.0
    wrong: float = 1.0

    @property
    def rate(self) -> float:
        """The chance of a guessed token, given that those before it were right."""
        return self.right / (self.right + self.wrong)

    def note(self, drafted: int, accepted: int) -> None:
        """`accepted` below 0: the draft spoilt the step."""
        if accepted < 0:
            self.right, self.wrong = 0.0, 1.0
            return
        self.right = self.right * MEMORY + accepted
        self.wrong = self.wrong * MEMORY + (accepted < drafted)

    def rest(self) -> None:
        """A token went by without a draft."""
        self.right += (1.0 - self.right) * RECOVERY
        self.wrong += (1.0 - self.wrong) * RECOVERY


def draft_length(rate: float, batch: int) -> int:
    """How many tokens are worth guessing beside `batch` sequences that decode: the last one still pays."""
    least = batch / (batch + WEIGHTS)
    if rate <= least:
        return 0
    return MOST if rate >= 1 else min(int(math.log(least) / math.log(rate)), MOST)


def lookup(tokens: array[int], most: int) -> array[int]:
    """At most `most` ids that followed where the path's end, two to four ids, stood before: the longest end wins, then
    the place that has most to give, then the latest. Empty where it never did."""
    nothing: array[int] = array("I")
    if most <= 0 or len(tokens) <= SHORTEST:
        return nothing
    ids = np.frombuffer(tokens, np.uint32)[-SEARCHED:]
    size = len(ids)
    ends = np.flatnonzero(ids[:-1] == ids[-1])  # where the last id stood before
    same = 1
    best = None
    while same < LONGEST and len(ends):
        ends = ends[ends >= same]
        ends = ends[ids[ends - same] == ids[size - 1 - same]]
        same += 1
        if len(ends) and same >= SHORTEST:
            whole = ends[size - 1 - ends >= most]
            best = int(whole[-1]) if len(whole) else int(ends[0])
    if best is None:
        return nothing
    return array("I", ids[best + 1 : best + 1 + most].tobytes())
