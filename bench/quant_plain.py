"""Other codecs in the engine's place, on the same windows and through the same engine, in this process.

plain    what one writes down first: no rotation, no full first unit, no full tail; the engine seals all at once
broken   two that look right and are not (bench.quant_broken)
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.quant_broken import BROKEN
from bench.quant_scores import InProcess
from engines.local.config import EngineConfig
from engines.local.engine import CoreRequest, LocalEngine
from engines.local.kv.precision import POLICIES, PrecisionPolicy
from engines.local.kv.quant import INT4_KEYS, INT8_KEYS, AffinePlane, Codec, codecs

PLAIN: Mapping[str, Codec] = {
    "int8": Codec("int8 by token", AffinePlane(8, "token", 0), AffinePlane(8, "token", 0)),
    "k8v4": Codec("int8 keys, int4 values by 32 channels", INT8_KEYS, AffinePlane(4, "token", 32)),
    "int4": Codec("KIVI-4, groups of 32", INT4_KEYS, AffinePlane(4, "token", 32)),
}


def scorer(
    model: Any, policy: str, codec: Codec | None, *, pool_bytes: int, rule: PrecisionPolicy | None = None
) -> InProcess:
    """An engine of this process over `model` (LoadedModel), with `codec` in the place of the policy's own."""

    def with_codec(dim: int) -> Mapping[str, Codec]:
        return {**codecs(dim), policy: codec} if codec is not None else codecs(dim)

    config = EngineConfig(pool_bytes=pool_bytes, kv_precision=policy)
    return InProcess(LocalEngine(model, config, time.monotonic, policy=rule, codecs=with_codec), CoreRequest)


def plain_scorer(model: Any, policy: str, *, pool_bytes: int) -> InProcess:
    bare = replace(POLICIES[policy], first_tokens=0, tail_tokens=0)
    return scorer(model, policy, PLAIN[policy], pool_bytes=pool_bytes, rule=bare)


def broken_scorers(model: Any, *, pool_bytes: int) -> dict[str, InProcess]:
    return {codec.name: scorer(model, "int8", codec, pool_bytes=pool_bytes) for codec in BROKEN}
