"""Which unit of a path keeps how many bits. Plain functions; knows no pages, no tensors and no clock.

    path   | system prompt, first unit | older ................ | the last turns, 64 tokens at least | open |
             full                        full, 8, 6 or 4 bits     full                                 full

A unit is 64 tokens (`quant.UNIT`) from a multiple of 64 on. What is older goes down with the path's length or with
the pool's pressure, as the policy says; never up, for what is gone cannot be had back.

A block is as good as the worst that went into it: its own bits, and the fewest among the blocks that were attended
to when it was computed (its lineage). A request that asks for more bits does not see it, and computes it anew.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engines.local.kv.quant import UNIT


class Precision(IntEnum):
    """The number is the bits of an element, keys and values together."""

    INT4 = 4
    K8V4 = 6
    INT8 = 8
    FULL = 16  # or more: the pool's own dtype

    @property
    def codec(self) -> str:
        """The name of the codec (`quant.codecs`); FULL has none."""
        return self.name.lower()


SEALED = (Precision.INT8, Precision.K8V4, Precision.INT4)  # the best first
Bits = NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Rung:
    """From `at` on: a share (of the window, or of the pool), or tokens where it is above 1."""

    at: float
    precision: Precision

    def reached(self, value: float, whole: float) -> bool:
        return value >= (self.at if self.at > 1 else self.at * whole)


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """`long` counts tokens of the whole path; `full` the share of the pool that is taken. Of both the lower precision
    counts."""

    name: str
    long: tuple[Rung, ...] = ()
    full: tuple[Rung, ...] = ()
    recent_turns: int = 3
    recent_share: float = 0.25  # of the window: more than that is not recent, however few turns it is
    tail_tokens: int = UNIT
    first_tokens: int = 4  # attention sinks: the unit that holds them stays full

    @property
    def seals(self) -> bool:
        """Whether it ever lowers anything."""
        return bool(self.long or self.full)


def _always(precision: Precision) -> PrecisionPolicy:
    return PrecisionPolicy(precision.codec, long=(Rung(0.0, precision),), recent_turns=0)


POLICIES = {
    policy.name: policy
    for policy in (
        PrecisionPolicy("full"),
        PrecisionPolicy(
            "auto",
            long=(Rung(0.25, Precision.INT8), Rung(0.50, Precision.INT4)),
            full=(Rung(0.50, Precision.INT8), Rung(0.75, Precision.K8V4), Rung(0.90, Precision.INT4)),
        ),
        PrecisionPolicy("seed", long=(Rung(8192, Precision.INT8), Rung(16384, Precision.INT4))),
        _always(Precision.INT8),
        _always(Precision.K8V4),
        _always(Precision.INT4),
    )
}


def policy_named(name: str, int8_at: float | None = None, int4_at: float | None = None) -> PrecisionPolicy:
    """The policy of that name; `int8_at`, `int4_at` in the place of its own lengths, as Rung.at. Raises ValueError."""
    if name not in POLICIES:
        raise ValueError(f"kv_precision is {name!r}, must be one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    if int8_at is None and int4_at is None:
        return policy
    if len(policy.long) != 2:
        raise ValueError(f"kv_int8_at and kv_int4_at are of the policies auto and seed, kv_precision is {name!r}")
    asked = zip(policy.long, (int8_at, int4_at), strict=True)
    return replace(policy, long=tuple(rung if at is None else replace(rung, at=at) for rung, at in asked))


@dataclass(frozen=True, slots=True)
class PathShape:
    """What is known of a path: its tokens, how many of them are system prompt, where its turns begin (ascending), and
    the fewest bits that its owner wants."""

    num_tokens: int
    system_tokens: int = 0
    turn_starts: tuple[int, ...] = ()
    min_bits: int = 0


def targets(
    path: PathShape,
    policy: PrecisionPolicy,
    *,
    window: int,
    pressure: float,
    usable: Set[Precision] = frozenset(SEALED),
) -> list[Precision]:
    """The precision of each whole unit of `path`, the first first.

    `window` in tokens; `pressure` is the share of the pool that is taken, 0 to 1; a precision that is not `usable` (a
    codec that this model does not bear) is replaced by the next better one.
    """
    first, recent = protected(path, policy, window)
    wanted = [Precision.FULL]
    wanted += [rung.precision for rung in policy.long if rung.reached(path.num_tokens, window)]
    wanted += [rung.precision for rung in policy.full if rung.reached(pressure, 1.0)]
    lowered = allowed(min(wanted), path.min_bits, usable)
    units = []
    for start in range(0, path.num_tokens - UNIT + 1, UNIT):
        if start < first or start + UNIT > recent:
            units.append(Precision.FULL)
            continue
        units.append(lowered)
    return units


def protected(path: PathShape, policy: PrecisionPolicy, window: int) -> tuple[int, int]:
    """Tokens that stay full: those before the first number, and those from the second on."""
    first = max(path.system_tokens, policy.first_tokens)
    recent = path.num_tokens - policy.tail_tokens
    if policy.recent_turns:
        turns = path.turn_starts[-policy.recent_turns :]
        begin = turns[0] if turns else path.num_tokens
        recent = min(recent, max(begin, path.num_tokens - int(policy.recent_share * window)))
    return first, max(recent, 0)


def allowed(wanted: Precision, min_bits: int, usable: Set[Precision]) -> Precision:
    """`wanted`, or the next better one that is usable and has `min_bits`."""
    good = [one for one in (*usable, Precision.FULL) if one >= max(wanted, min(min_bits, Precision.FULL))]
    return min(good)


def lineage(before: int, own: Bits, lineages: Bits) -> int:
    """The fewest bits that anything computed now is made from: `before` those of what was read so far, then blocks
    with these bits and lineages."""
    return min(before, int(own.min(initial=Precision.FULL)), int(lineages.min(initial=Precision.FULL)))


def good_prefix(own: Bits, lineages: Bits, min_bits: int) -> int:
    """How many blocks, from the first on, are at least as good as `min_bits`."""
    good = np.minimum(own, lineages) >= min(min_bits, Precision.FULL)
    return len(good) if bool(good.all()) else int(good.argmin())
