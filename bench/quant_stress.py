"""What no text shows by itself, in this process, through the same engine.

key bias   the error of sealing `key + bias`, bias a vector of norm 400 turned as RoPE turns it, put into the keys of
           the first and the last layer: the function is the same, the codes have to hold far more. Values in fp16
demotion   units sealed to 8 bits and from there to 4, against 4 bits at once
restore    CPU time to decode a session's units, against that to compute the session anew
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from bench.quant_plain import broken_scorers, scorer
from bench.quant_scores import InProcess
from bench.quant_texts import Window
from bench.quant_windows import Reference, Turn
from engines.local.kv.precision import POLICIES, SEALED, PrecisionPolicy, Rung
from engines.local.kv.precision import Precision as Bits
from engines.local.kv.quant import INT4_KEYS, INT8_KEYS, METADATA, UNIT, AffinePlane, Codec, Encoded, PlaneLayout

NORM = 400.0


@dataclass(frozen=True, slots=True)
class PlainPlane:
    """Elements as they are, in `held`: float32, or float16, which the engine takes for a codec as it saves bytes."""

    held: torch.dtype
    turned: bool = False

    def layout(self, heads: int, dim: int) -> PlaneLayout:
        return PlaneLayout((UNIT, heads, self.held.itemsize * dim), (1, heads, 1))

    def encode(self, x: Tensor) -> Encoded:
        nothing = torch.zeros(len(x), 1, x.shape[2], 1, dtype=METADATA)
        return Encoded(x.to(self.held).contiguous().view(torch.uint8), nothing, nothing)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        return encoded.codes.contiguous().view(self.held).to(dtype)


@dataclass(frozen=True, slots=True)
class BiasedPlane:
    """Holds, in float32, what `inner` makes of the keys with a bias on the first and the last layer, less that bias.

    For one engine that seals one path's units in their order, all layers of a unit at once: a position is known by
    how many came before.
    """

    inner: AffinePlane
    bias: Callable[[Tensor, int], Tensor]  # positions [tokens], layer 0 or -1 -> [tokens, heads, dim]
    exact: PlainPlane = PlainPlane(torch.float32)
    units: count[int] = field(default_factory=lambda: count(1))  # the first unit stays full
    turned: bool = False

    def layout(self, heads: int, dim: int) -> PlaneLayout:
        return self.exact.layout(heads, dim)

    def encode(self, x: Tensor) -> Encoded:
        positions = torch.arange(UNIT) + next(self.units) * UNIT
        moved = torch.zeros_like(x)
        moved[0], moved[-1] = self.bias(positions, 0), self.bias(positions, -1)
        return self.exact.encode(self.inner.decode(self.inner.encode(x + moved), x.dtype) - moved)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        return self.exact.decode(encoded, dtype)


def biases(model: Any) -> Callable[[Tensor, int], Tensor]:
    """Biases of norm NORM for the first and the last layer, turned to each position as the model turns its keys."""
    layers = sorted(model.shapes)
    shape, draw = model.shapes[layers[0]], torch.Generator().manual_seed(0)
    drawn = {at: torch.randn(1, shape.kv_heads, shape.key_dim, generator=draw) for at in (0, -1)}

    def bias(positions: Tensor, layer: int) -> Tensor:
        rotation, still = model.rotations[layers[layer]], drawn[layer]
        still = (still * NORM / still.norm()).expand(len(positions), -1, -1)
        if rotation is None:
            return still.clone()
        turned: Tensor = rotation.turned(still, rotation.angles(torch.zeros_like(positions), positions))
        return turned

    return bias


def parted(found: InProcess, window: Window, past: int, *, sealed: str, before: int | None = None) -> Turn:
    """One window at an engine of this process: over its past in full, then sealed, as the codec named `sealed`; sealed
    first with the length `before`, where that is given."""
    session, ids = "s", window.ids[:-1]
    reference = Reference(found.score(session, ids, past, 16))
    if before is not None:
        found.run(session, ids[:before], 0)
        units = found.core.stats().sealed
        assert units["int8"], f"nothing went to 8 bits first: {units}"
        assert not units["int4"], f"sealed to 4 bits too early: {units}"
    found.run(session, ids[:past], 0)
    units = found.core.stats().sealed
    assert units[sealed] == sum(units.values()) > 0, f"sealed otherwise than as {sealed}: {units}"
    turn = reference.compare(found.score(session, ids, past, 0), window.ids[past + 1 :])
    found.forget(session)
    return turn


def key_bias(model: Any, windows: Sequence[Window], past: int, pool_bytes: int) -> dict[str, float]:
    """Mean KL by the codec of the keys: of `int8` (and `k8v4`, whose keys are the same), and of `int4`."""
    told = {}
    for name, plane in (("int8", INT8_KEYS), ("int4", INT4_KEYS)):
        kls = []
        for window in windows:
            codec = Codec(f"{name} biased", BiasedPlane(plane, biases(model)), PlainPlane(torch.float16))
            found = scorer(model, name, codec, pool_bytes=pool_bytes)
            kls.append(parted(found, window, past, sealed=name).kl)
        told[name] = sum(kls) / len(kls)
    return {"int8": told["int8"], "k8v4": told["int8"], "int4": told["int4"]}


def demotion(model: Any, windows: Sequence[Window], past: int, pool_bytes: int) -> dict[str, float]:
    """Mean KL of 4 bits made from 8, and at once."""
    twice = PrecisionPolicy("int4", long=(Rung(2, Bits.INT8), Rung(past, Bits.INT4)), recent_turns=0)
    kls: dict[str, list[float]] = {"demoted": [], "direct": []}
    for window in windows:
        for name, rule, before in (("demoted", twice, past - 2), ("direct", POLICIES["int4"], None)):
            found = scorer(model, "int4", None, pool_bytes=pool_bytes, rule=rule)
            kls[name].append(parted(found, window, past, sealed="int4", before=before).kl)
    return {name: sum(found) / len(found) for name, found in kls.items()}


def restore(model: Any, window: Window, past: int, pool_bytes: int) -> dict[str, float]:
    """CPU seconds to compute the past over those to decode its units in all layers, by precision."""
    told = {}
    for precision in SEALED:
        found = scorer(model, precision.codec, None, pool_bytes=pool_bytes)
        began = time.process_time()
        found.run("s", window.ids[:past], 16)
        prefill_s = time.process_time() - began
        found.run("s", window.ids[:past], 0)
        arena = found.core._runner._storage.arenas[precision]
        units = torch.arange(sum(found.core.stats().sealed.values()))
        spent = []
        for _ in range(3):
            began = time.process_time()
            for layer in model.shapes:
                arena.read(layer, units, model.dtype)
            spent.append(time.process_time() - began)
        told[precision.codec] = prefill_s * len(units) * UNIT / past / min(spent)
    return told


def broken(model: Any, window: Window, past: int, pool_bytes: int) -> dict[str, dict[str, float]]:
    """What two broken codecs do in the place of `int8`."""
    told = {}
    for name, found in broken_scorers(model, pool_bytes=pool_bytes).items():
        turn = parted(found, window, past, sealed="int8")
        told[name] = {"kl": turn.kl, "top1": turn.top1}
    return told
