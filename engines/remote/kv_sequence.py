"""What a batch of KV events is to somebody who knows those before it. Pure: knows no socket and no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Mark:
    """A batch that was taken: its number, its time by the replica's clock, and what tells it from another of that
    number (kv_snapshot.mark_of)."""

    seq: int
    at_s: float
    mark: bytes


class Step(Enum):
    NEXT = auto()  # it follows the last one
    SEEN = auto()  # it came by replay or snapshot already
    GAP = auto()  # batches between are missing
    STALE = auto()  # of a publisher that is no more
    ANEW = auto()  # the publisher counts from the beginning again: what is known of it is void


def step(last: Mark, live: int, came: Mark) -> Step:
    """`last` is the last batch taken, `live` the number of the last that came over the subscription (-1: none).

    A publisher's numbers and times only grow, so a number that is not above `live` comes from another publisher, and
    likewise what is younger than `last` in one and older in the other. Where a clock was set back, they are stale, too:
    a replay tells the two apart.
    """
    if came.seq <= live:
        return Step.ANEW
    if came.seq <= last.seq:
        newer = came.at_s > last.at_s or (came.seq == last.seq and came.mark != last.mark)
        return Step.ANEW if newer else Step.SEEN
    if came.at_s < last.at_s:
        return Step.STALE
    return Step.NEXT if came.seq == last.seq + 1 else Step.GAP
