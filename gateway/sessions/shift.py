"""After a cut: where the kept turns stand in the new prompt, and where in the old path their K/V lies.

    old path   | first turn | turns that a summary replaced | kept turns |
    prompt     | first turn | summary |                     kept turns | new message |
                                        dest_start          `- length -'

Taking K/V to another position makes the answer approximate, so it is asked for by policy only. Knows ids alone.
"""

from __future__ import annotations

from engines.contract import Base, Shift

ID_BYTES = 4  # u32
ANCHOR = 16  # ids at the old path's end that are looked for in the prompt
LEAST = 128  # ids; fewer are computed as fast


def shift_after_cut(path: bytes, prompt: bytes, base: Base) -> Shift | None:
    """The longest end of `path` that stands elsewhere in `prompt`; ids are u32 little-endian. `base` names the path."""
    anchor = path[-ANCHOR * ID_BYTES :]
    end = prompt.rfind(anchor)
    while end > 0 and end % ID_BYTES:
        end = prompt.rfind(anchor, 0, end + len(anchor) - 1)
    if end < 0 or len(anchor) < ANCHOR * ID_BYTES:
        return None
    stop = end // ID_BYTES + ANCHOR
    length = common_end(path, prompt[: stop * ID_BYTES])
    source_start, dest_start = len(path) // ID_BYTES - length, stop - length
    if length < LEAST or source_start == dest_start:
        return None
    return Shift(base, source_start, dest_start, length)


def common_end(one: bytes, other: bytes) -> int:
    """Ids that both end with: halve the range, comparing slices of bytes."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        size = middle * ID_BYTES
        if one[-size:] == other[-size:]:
            low = middle
        else:
            high = middle - 1
    return low
