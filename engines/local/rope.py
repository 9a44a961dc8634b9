"""The rotation by which RoPE puts a position into a key (Su et al., RoFormer, arXiv 2104.09864), and the way from one
position to another.

    channels   | 0 ... n-1 | n ... 2n-1 | rest |       halves: (i, n + i) turn together; neighbours: (2i, 2i + 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """`inv_freq` float32 [n], radians a position. `neighbours`: channels (2i, 2i + 1) turn, else (i, n + i)."""

    inv_freq: Tensor
    neighbours: bool = False

    def angles(self, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [tokens, n], float32, of the way from positions `old` to `new` (int64 [tokens]).

        Each position's own angle is rounded to float32 first, as the model rounds it: far out in the window that is
        larger than any other error here. Equal positions give exactly 1 and 0.
        """
        way = new.float()[:, None] * self.inv_freq - old.float()[:, None] * self.inv_freq
        return way.cos(), way.sin()

    def turned(self, keys: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """`keys` [tokens, kv_heads, dim] turned by `angles`, in float32, as their own dtype."""
        cos, sin = angles[0][:, None], angles[1][:, None]
        size = len(self.inv_freq)
        one, other = (slice(0, 2 * size, 2), slice(1, 2 * size, 2)) if self.neighbours else (
            slice(0, size), slice(size, 2 * size)
        )  # fmt: skip
        result = keys.clone()
        first, second = keys[..., one].float(), keys[..., other].float()
        result[..., one] = (first * cos - second * sin).to(keys.dtype)
        result[..., other] = (second * cos + first * sin).to(keys.dtype)
        return result


Rotations = Mapping[int, Rotation | None]  # by layer; None: its keys carry no position
