"""Which free pages to give out: a path in one run can be read without a copy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose(is_free: NDArray[np.bool_], count: int, after: int) -> NDArray[np.int32]:
    """`count` free pages, in as few runs as may be, from the one after page `after` on if that is free (0: anywhere).

    A new run starts amid the longest stretch of free pages, so that several growing paths leave each other room.
    """
    chosen: list[NDArray[np.int32]] = []
    left = count
    page = after + 1
    if after:
        stretch = is_free[page : page + left]
        run = len(stretch) if bool(stretch.all()) else int(stretch.argmin())
        chosen.append(np.arange(page, page + run, dtype=np.int32))
        left -= run
    if left:
        free = is_free.copy()
        if chosen:
            free[chosen[0]] = False
        edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).view(np.int8)))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        for i in np.argsort(-lengths, kind="stable").tolist():
            room = int(lengths[i])
            run = min(left, room)
            first = int(starts[i]) + ((room - run) // 2 if starts[i] > 1 else 0)
            chosen.append(np.arange(first, first + run, dtype=np.int32))
            left -= run
            if not left:
                break
    return np.concatenate(chosen) if chosen else np.empty(0, np.int32)
