"""nn.Linear for a few rows on a CPU: the weight on the left. The same weights, nothing copied or repacked.

A decode step multiplies each weight by as many rows as sequences decode. MKL's float32 product of few rows on the left
packs the big factor again and again; with the weight on the left it streams it once. One thread of an AVX2 machine,
SmolLM2-135M's shapes, CPU ms (docs/log.md has all of them, and what did not help):

    rows                            1     2     4     8    12
    30 layers   rows @ weight.T    52    68   108   137   165
                (weight @ rows.T).T     69    87   127   208
    vocabulary  rows @ weight.T    13    28    49    56
                (weight @ rows.T).T     17    21    26
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST, MOST = 2, 8  # rows for which the weight on the left is faster


class FewRowsLinear(nn.Linear):
    """As nn.Linear; equal to it up to the order of sums."""

    def forward(self, input: Tensor) -> Tensor:
        width = input.shape[-1]
        if not FEWEST <= input.numel() // width <= MOST:
            return F.linear(input, self.weight, self.bias)
        product = torch.mm(self.weight, input.reshape(-1, width).t()).t().contiguous()
        if self.bias is not None:
            product += self.bias
        return product.view(*input.shape[:-1], -1)


def favour_few_rows(module: nn.Module) -> int:
    """Switch every plain float32 nn.Linear of `module` on a CPU to FewRowsLinear -> how many."""
    switched = 0
    for part in module.modules():
        weight = getattr(part, "weight", None)  # what a quantizer has packed may have none
        if type(part) is nn.Linear and weight is not None and _plain(weight):
            part.__class__ = FewRowsLinear
            switched += 1
    return switched


def _plain(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu"
