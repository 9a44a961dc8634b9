"""What turns were expected to find cached, against what their replicas reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def error_of(turn: dict[str, Any]) -> int:
    """Tokens, of one answered turn as the session API shows it."""
    return abs(int(turn["placement"]["expected_cached_tokens"]) - int(turn["usage"]["cached_tokens"]))


def told(turns: Sequence[dict[str, Any]]) -> dict[str, int]:
    errors = sorted(map(error_of, turns))
    return {
        "turns": len(errors),
        "error_p50_tokens": errors[len(errors) // 2],
        "error_p95_tokens": errors[len(errors) * 95 // 100],
        "error_max_tokens": errors[-1],
    }
