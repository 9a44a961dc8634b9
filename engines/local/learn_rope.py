"""How a model's keys turn with their position, learnt from the model itself, so that a written key can be moved.

A one-token sequence attends to nothing but itself, so what goes into a layer does not depend on where the token stands.
Whatever differs between its keys at two positions is the position's doing, and that in every layer. With RoPE it is a
rotation by `position * inv_freq` of pairs of channels; a layer's frequencies and pairing are those of the model's own
buffers that turn the one key into the other. A layer whose two keys are equal carries no position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.local.attention import Probe
from engines.local.rope import Rotation, Rotations

NEAR, STRIDE = 2, 500  # positions that are compared: NEAR, and STRIDE further or as far as the window goes
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the difference over the key; a wrong rotation gives about 1
TOLERANCE_16_BIT = 0.03


class CannotShift(Exception):
    """The keys of this model cannot be moved to another position; says why."""


def rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """The RoPE parameters of a text config: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def learn_rotations(module: nn.Module, config: Any, window: int, look: Callable[[int], Probe]) -> Rotations:
    """The rotation of every layer; `look(position)` runs one token there. Raises CannotShift."""
    if any("mrope_section" in settings for settings in rope_settings(config)):
        raise CannotShift("its positions have several axes (mrope)")
    candidates = _candidates(module)
    if not candidates:
        raise CannotShift("it has no RoPE")
    far = min(NEAR + STRIDE, window - 1)
    if far <= NEAR:
        raise CannotShift(f"its window of {window} tokens is too short to learn from")
    one, other = look(NEAR), look(far)
    windowed = sorted(layer for layer, width in one.windows.items() if width is not None)
    if windowed:
        raise CannotShift(f"{len(windowed)} of {len(one.shapes)} layers attend to a sliding window")
    found = {layer: _rotation(layer, one.keys[layer], other.keys[layer], far, candidates) for layer in one.shapes}
    if not any(found.values()):
        raise CannotShift("its keys carry no position")
    return found


def _candidates(module: nn.Module) -> list[Rotation]:
    distinct: list[Tensor] = []
    for name, buffer in module.named_buffers():
        own = name.rpartition(".")[2]
        if not own.endswith("inv_freq") or own.endswith("original_inv_freq") or buffer.ndim != 1:
            continue
        if not any(torch.equal(buffer.float(), seen) for seen in distinct):
            distinct.append(buffer.float())
    return [Rotation(frequencies, neighbours) for frequencies in distinct for neighbours in (False, True)]


def _rotation(layer: int, near: Tensor, far: Tensor, at: int, candidates: Sequence[Rotation]) -> Rotation | None:
    """What turns key `near` (kept from position NEAR) into key `far` (of position `at`); both [kv_heads, dim]."""
    tolerance = TOLERANCE.get(near.dtype, TOLERANCE_16_BIT)
    old, new = (torch.tensor([position], device=near.device) for position in (NEAR, at))

    def same(key: Tensor) -> bool:
        return bool((key.float() - far.float()).norm() <= tolerance * far.float().norm())

    if same(near):
        return None
    for rotation in candidates:
        if 2 * len(rotation.inv_freq) <= near.shape[-1] and same(
            rotation.turned(near[None], rotation.angles(old, new))[0]
        ):
            return rotation
    raise CannotShift(f"the keys of layer {layer} do not turn with their position as those of plain RoPE do")
