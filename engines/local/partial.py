"""Attention over K/V in parts, a piece at a time: partial softmax results, merged (flash decoding; Milakov and
Gimelshein, arXiv 1805.02867). The reference that any kernel over sealed pages is held against.

    for each part, in pieces of at most PIECE tokens:
        logits = q k^T * scale              keys of the piece, decoded here and dropped again
        most'  = max(most, logits)          all in float32
        total  = total * e^(most - most') + sum e^(logits - most')
        out    = out * e^(most - most') + e^(logits - most') v
    result = out / total

Values that lie rotated are multiplied as they lie, and the product is turned back: once a query, not once a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.local.kv.spans import MixedSpan, Part
from engines.local.kv.storage import KVStorage

PIECE = 1024  # tokens decoded at once: a few MB of one layer, whatever the session's length


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made from queries and keys, as the layer says."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [heads]

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


@dataclass(slots=True)
class Merged:
    """Softmax over what was added so far; all float32, rows of one query [kv_heads, group, tokens]."""

    most: Tensor  # [..., 1] the largest logit
    total: Tensor  # [..., 1] of e^(logit - most)
    out: Tensor  # [..., value_dim]

    @classmethod
    def empty(cls, query: Tensor, value_dim: int, sinks: Tensor | None) -> Merged:
        """A sink is a logit that takes weight and gives nothing: what there is before the first token."""
        rows = (*query.shape[:-1], 1)
        out = query.new_zeros((*query.shape[:-1], value_dim), dtype=torch.float32)
        if sinks is None:
            return cls(out.new_full(rows, -torch.inf), out.new_zeros(rows), out)
        most = sinks.float().view(query.shape[0], query.shape[1], 1, 1).expand(rows)
        return cls(most, out.new_ones(rows), out)

    def add(self, logits: Tensor, value: Tensor, turn: Tensor | None) -> None:
        """`logits` float32 [kv_heads, group, tokens, keys], -inf where nothing is to be seen; `value` [kv_heads, keys,
        value_dim], turned by `turn`."""
        most = torch.maximum(self.most, logits.amax(-1, keepdim=True))
        calm = most.masked_fill(most == -torch.inf, 0.0)  # a row that has seen nothing yet: e^(-inf - 0) = 0
        before = torch.exp(self.most - calm)
        weights = torch.exp_(logits.sub_(calm))
        product = torch.matmul(weights.flatten(1, 2).to(value.dtype), value).view_as(self.out).float()
        if turn is not None:
            product = product @ turn.T
        self.total = self.total * before + weights.sum(-1, keepdim=True)
        self.out = self.out * before + product
        self.most = most

    def result(self) -> Tensor:
        return self.out / self.total


def attend_parts(storage: KVStorage, layer: int, span: MixedSpan, query: Tensor, first: int, scores: Scores) -> Tensor:
    """`query` [kv_heads, group, tokens, dim] of positions `first` ... -> the same with value_dim, in its dtype.

    A query sees keys up to its own position, and no further back than the window.
    """
    merged = Merged.empty(query, storage.values[layer].shape[3], scores.sinks)
    tokens = query.shape[2]
    oldest = 0 if scores.window is None else max(first - scores.window + 1, 0)  # that the first query sees
    for part, start, stop in _pieces(span, oldest):
        key, value, turn = storage.read_part(layer, part, start, stop)
        logits = (
            torch.matmul(query.flatten(1, 2), key.transpose(1, 2)).float().view(*query.shape[:3], -1) * scores.scale
        )
        if scores.softcap is not None:
            logits = torch.tanh(logits / scores.softcap) * scores.softcap
        begin, end = part.start + start, part.start + stop
        if end - 1 > first or (scores.window is not None and begin <= first + tokens - 1 - scores.window):
            position = torch.arange(first, first + tokens, device=query.device)[:, None]
            at = torch.arange(begin, end, device=query.device)
            seen = at <= position
            if scores.window is not None:
                seen &= at > position - scores.window
            logits.masked_fill_(~seen, -torch.inf)
        merged.add(logits, value, turn)
    return merged.result().to(query.dtype)


def _pieces(span: MixedSpan, oldest: int) -> Iterator[tuple[Part, int, int]]:
    """Part, and tokens of it from one to another, from position `oldest` on."""
    for part in span.parts:
        for start in range(max(oldest - part.start, 0), part.length, PIECE):
            yield part, start, min(start + PIECE, part.length)
