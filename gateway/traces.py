"""A mistake of our own as the log tells it: where it happened, and nothing of what the conversation holds."""

from __future__ import annotations

import traceback

MOST_FRAMES = 40
MOST_TEXT = 200  # characters of the exception's own words: they may quote what somebody sent


def trace_of(error: BaseException) -> str:
    """File, line and function of each frame, causes first. No local variables: they are messages and prompts."""
    lines = []
    for cause in _chain(error):
        frames = traceback.extract_tb(cause.__traceback__)[-MOST_FRAMES:]
        lines += [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        lines.append(f"{type(cause).__name__}: {str(cause)[:MOST_TEXT]}")
    return "\n".join(lines)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it came from, the oldest first."""
    found = [error]
    while (before := found[-1].__cause__ or found[-1].__context__) is not None and before not in found:
        found.append(before)
    return found[::-1]
