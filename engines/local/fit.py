"""What fits a card: weights, activations and KV cache, in bytes. Plain arithmetic; knows no model and no torch.

    memory of the card | runtime | weights | activations of a step | KV pool                           |
                                                                     sessions of n tokens, in a precision

Every number is an upper estimate; what a run really takes is measured by `python -m bench.gpu`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 1 << 30
RUNTIME_BYTES = (
    600 << 20
)  # CUDA context, cuBLAS workspaces, compiled kernels: what such processes usually show; on a GPU
FREE_SHARE = 0.03  # of the card, for what the allocator cannot use
UNIT_TOKENS = 64  # quant.UNIT
FULL_TOKENS = 3 * UNIT_TOKENS  # of a session under int8, k8v4 or int4: first unit, tail, the unit that is still open
SEALED_SHARE = 0.75  # of the pool, for sealed units where they have memory of their own (a GPU)
KV_NAMES = ("full", "int8", "k8v4", "int4")


@dataclass(frozen=True, slots=True)
class Footprint:
    """A model as it lies in memory. `kv_bytes` of one token over all layers, by what it is kept in (KV_NAMES)."""

    name: str
    parameters: int
    weights: str  # in words: "bfloat16", "4-bit awq, groups of 128"
    weight_bytes: int
    kv_bytes: Mapping[str, float]
    window: int  # tokens
    activation_bytes: int
    runtime_bytes: int = RUNTIME_BYTES
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Fit:
    """On a card of `memory_bytes`; `sessions[tokens][precision]` such sessions are held at once."""

    memory_bytes: int
    pool_bytes: int  # below 0: so much is missing
    sessions: Mapping[int, Mapping[str, int]]

    @property
    def fits(self) -> bool:
        return self.pool_bytes > 0


def fit(footprint: Footprint, memory_bytes: int, tokens: tuple[int, ...], *, apart: bool = True) -> Fit:
    """`apart`: sealed units have SEALED_SHARE of the pool, as on a GPU; else one budget holds both, as on a CPU."""
    pool = pool_bytes(footprint, memory_bytes)
    held = {
        count: {name: sessions(pool, footprint.kv_bytes, count, name, apart=apart) for name in footprint.kv_bytes}
        for count in tokens
        if count <= footprint.window
    }
    return Fit(memory_bytes, pool, held)


def pool_bytes(footprint: Footprint, memory_bytes: int) -> int:
    taken = footprint.runtime_bytes + footprint.weight_bytes + footprint.activation_bytes
    return int(memory_bytes * (1 - FREE_SHARE)) - taken


def sessions(pool: int, kv_bytes: Mapping[str, float], tokens: int, precision: str, *, apart: bool) -> int:
    """Sessions of `tokens` that a pool holds under the policy `precision`."""
    if pool <= 0:
        return 0
    full = min(tokens, FULL_TOKENS) if precision != "full" else tokens
    full_bytes = full * kv_bytes["full"]
    sealed_bytes = (tokens - full) * kv_bytes[precision]
    if precision == "full" or not apart:
        return int(pool / (full_bytes + sealed_bytes))
    of_full = int(pool * (1 - SEALED_SHARE) / full_bytes)
    return min(of_full, int(pool * SEALED_SHARE / sealed_bytes)) if sealed_bytes else of_full


def activation_bytes(
    *, batch_tokens: int, sampled_rows: int, hidden: int, widest: int, attended: int, vocab: int, itemsize: int
) -> int:
    """Of one step: `batch_tokens` rows of a layer at its widest, and the logits of `sampled_rows`.

    Alive at once are the residual, its norm and a layer's in- and outputs (6 x `hidden`), the feed-forward's two inner
    rows and their product (3 x `widest`), attention's partial results in float32 (2 x `attended` = heads * value_dim),
    and three float32 copies of the logits.
    """
    of_layer = batch_tokens * (6 * hidden + 3 * widest) * itemsize + batch_tokens * attended * 2 * 4
    return of_layer + sampled_rows * vocab * 3 * 4


def told(footprint: Footprint, memory_bytes: int) -> str:
    """The arithmetic in one sentence."""
    pool = pool_bytes(footprint, memory_bytes)
    parts = (
        f"weights {_gib(footprint.weight_bytes)} ({footprint.weights})",
        f"activations {_gib(footprint.activation_bytes)}",
        f"runtime {_gib(footprint.runtime_bytes)}",
        f"allocator {_gib(int(memory_bytes * FREE_SHARE))}",
    )
    rest = f"leaves {_gib(pool)} for the KV pool" if pool > 0 else f"is {_gib(-pool)} too little for it, without any KV"
    return f"{footprint.name}: {_gib(memory_bytes)} of memory less {', '.join(parts)} {rest}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
