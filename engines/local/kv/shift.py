"""KV shift: K/V that a session has written, taken to another position of a new prompt. Knows pages, no tensors.

    kept path   | .......... | source_start ........ + length | ... |      written, and still in its pages or not
    new prompt  | exact prefix | dest_start | ........ + length | rest |
                               | recompute  | copied, turned   |
                                exact         approximate        computed on what is approximate
                0            cached        start             stop       num_tokens

A copied key or value still knows what stood before it in the kept path, so everything from `start` on is approximate:
it is never published, never kept for a session, and gone when the request ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines.contract import RequestRefused, Shift
from engines.local.kv.pool import KVPool, Pages, Slots
from engines.local.kv.session_cache import KeptBlocks


@dataclass(frozen=True, slots=True)
class Moved:
    """What a request may copy: `length` ids of a kept path from `source_start` on, which its prompt holds from
    `dest_start` on; the first `recompute` of them are computed all the same."""

    blocks: KeptBlocks
    source_start: int
    dest_start: int
    length: int
    recompute: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens start ... stop of a prompt, from position `source` of the kept path on; `pages` hold them, from slot
    `source % block_size` of the first on."""

    start: int
    stop: int
    source: int
    pages: Pages


def refuse_shift(shift: Shift, num_tokens: int, session: str | None) -> None:
    """Raise RequestRefused for a shift that cannot be meant."""
    if session is None:
        raise RequestRefused("a shift needs the session whose path it names", param="shift")
    if min(shift.source_start, shift.dest_start, shift.recompute) < 0 or shift.length < 1:
        raise RequestRefused("a shift has no negative place, and moves at least one token", param="shift")
    if shift.source_start + shift.length > shift.base.length:
        raise RequestRefused(
            f"the shift ends at {shift.source_start + shift.length} of a base of {shift.base.length} ids", param="shift"
        )
    if shift.dest_start + shift.length > num_tokens:
        raise RequestRefused(
            f"the shift ends at {shift.dest_start + shift.length} of a prompt of {num_tokens} ids", param="shift"
        )


def find_copy(moved: Moved, pool: KVPool, block_size: int, *, cached: int, num_tokens: int) -> Copy | None:
    """What can be copied now, after `cached` tokens of the prompt that are there exactly; None: nothing.

    At least the prompt's last token is left to run. Where source pages have gone, what lies before them is copied.
    """
    start = max(cached, moved.dest_start + moved.recompute)
    stop = min(moved.dest_start + moved.length, num_tokens - 1)
    source = moved.source_start + start - moved.dest_start
    if stop <= start:
        return None
    blocks, first = moved.blocks, source // block_size
    last = min(-(-(source + stop - start) // block_size), len(blocks.pages))
    pages = blocks.pages[first:last]
    pages = pages[: pool.resident(pages, blocks.uids[first:last])]
    if len(sealed := np.flatnonzero(pages > pool.total)):  # keys of few bits are not turned
        pages = pages[: int(sealed[0])]
    written = (first + len(pages)) * block_size
    tail_is_next = written == len(blocks.pages) * block_size and blocks.tail_len > 0
    if tail_is_next and pool.owner[blocks.tail_page] == blocks.tail_uid:
        pages = np.append(pages, np.int32(blocks.tail_page))
        written += blocks.tail_len
    stop = min(stop, start + written - source)
    return Copy(start, stop, source, pages) if stop > start else None


def slots_of(pages: Pages, first: int, count: int, block_size: int) -> Slots:
    """Slots of `count` tokens from token `first` of `pages` on."""
    places = np.arange(first, first + count)
    return pages.astype(np.int64)[places // block_size] * block_size + places % block_size
