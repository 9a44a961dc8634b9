"""Whether this model bears the codecs: a short text parked in each, before anything is served.

    text   | past: 384 tokens, full, then sealed | 96 tokens whose next-token distributions are compared |

A precision whose KL divergence is more than TOLERANCE times its bar is not used for this model; which bars, and how
they were found: docs/kv-quantization.md. Models with a large bias on their keys are what this is for.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pydoc_data.topics import topics  # type: ignore[import-untyped,unused-ignore]

import torch
from torch import Tensor

from engines.contract import Sampling
from engines.local.config import EngineConfig
from engines.local.engine import CoreRequest, LocalEngine
from engines.local.kv.precision import POLICIES, SEALED, Precision
from engines.local.kv.quant import codecs as quant_codecs
from engines.local.kv.sealed import Codecs
from engines.local.model import LoadedModel

PAST, SCORED = 384, 96  # tokens
TOLERANCE = 10.0
BARS: Mapping[Precision, float] = {Precision.INT8: 3e-5, Precision.K8V4: 5e-4, Precision.INT4: 3e-3}  # nats a token
TOPIC = "exceptions"  # of Python's language reference: English that every installation has


@dataclass(frozen=True, slots=True)
class Borne:
    """`kl` by precision, nats a token; `refused` says of each that is not borne why."""

    kl: Mapping[Precision, float]
    refused: Mapping[Precision, str]

    @property
    def usable(self) -> frozenset[Precision]:
        return frozenset(self.kl.keys() - self.refused.keys())


def wanted_by(policy: str) -> tuple[Precision, ...]:
    """The precisions that a policy may ask for, the best first."""
    rungs = (*POLICIES[policy].long, *POLICIES[policy].full)
    asked = {rung.precision for rung in rungs}
    return tuple(precision for precision in SEALED if precision in asked)


def self_check(model: LoadedModel, config: EngineConfig, ids: list[int], *, codecs: Codecs = quant_codecs) -> Borne:
    """Park `ids` (PAST + SCORED at least, else all but a fifth) in every precision that the policy may ask for, and in
    the next better one for each that is refused: keys with a large bias bear 8 bits where they do not bear 4."""
    scored = min(SCORED, len(ids) // 5)
    ids = ids[-(PAST + scored) :]
    past = len(ids) - scored
    kl: dict[Precision, float] = {}
    refused: dict[Precision, str] = {}
    todo = list(wanted_by(config.kv_precision))
    while todo:
        precision = todo.pop()
        kl[precision] = _divergence(model, config, ids, past, precision, codecs)
        most = TOLERANCE * BARS[precision]
        if not kl[precision] <= most:  # NaN too
            refused[precision] = f"KL {kl[precision]:.1e} over a text of {len(ids)} tokens, at most {most:.0e}"
            better = min((one for one in SEALED if one > precision), default=None)
            todo += [better] if better is not None and better not in (*kl, *todo) else []
    return Borne(kl, refused)


def text_ids(model: LoadedModel) -> list[int]:
    """Ids of a text to check with; of no use for a model without a tokenizer."""
    if model.tokenizer is None:
        return []
    return [int(i) for i in model.tokenizer(topics[TOPIC] * 4, add_special_tokens=False)["input_ids"][: PAST + SCORED]]


def _divergence(
    model: LoadedModel, config: EngineConfig, ids: list[int], past: int, precision: Precision, codecs: Codecs
) -> float:
    pages = 3 * -(-len(ids) // config.block_size) + 2
    small = EngineConfig(
        block_size=config.block_size,
        pool_bytes=(pages + 1) * config.block_size * model.kv_bytes_per_token,
        max_running=1,
        max_batch_tokens=config.max_batch_tokens,
        kv_precision=precision.codec,
        kernels=config.kernels,
        seed=0,
    )
    engine = LocalEngine(model, small, time.monotonic, codecs=codecs)
    full = _score(engine, ids, past, 16)
    _score(engine, ids[:past], None, 0)  # parked: sealed when this returns
    sealed = _score(engine, ids, past, 0)
    return float((full.exp() * (full - sealed)).sum(-1).mean())


def _score(engine: LocalEngine, ids: list[int], start: int | None, min_bits: int) -> Tensor:
    """Run to the end, sealing included -> float64 [scored tokens, vocab]."""
    request = CoreRequest(
        "check", array("I", ids).tobytes(), None, "check", "", 0, Sampling(max_tokens=1, temperature=0.0),
        min_bits=min_bits, score_from=start,
    )  # fmt: skip
    engine.submit(request)
    scores = b""
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                return torch.full((1, 1), torch.nan)
            scores += output.scores
    found = torch.frombuffer(bytearray(scores), dtype=torch.float32) if scores else torch.empty(0)
    return found.view(len(ids) - start if start is not None else 0, -1).double() if scores else found
