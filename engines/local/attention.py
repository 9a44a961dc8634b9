"""Attention over paged K/V, as transformers' AttentionInterface calls it. One ragged batch, no Cache object.

    tokens   | d0 | d1 | ... | c0 c0 c0 | c1 c1 |      decode rows (one token each), then prefill chunks
    q        [1, heads, tokens, key_dim]   k, v [1, kv_heads, tokens, dim], after RoPE

The model passes our `kv=KVStep` through its **kwargs. Each call writes the layer's k and v into pages, then attends:
chunks one by one; decode rows one by one on a CPU (a row whose pages stand in one run is read where it lies, and no
row is padded or masked), elsewhere all at once over their padded page tables. Queries of a GQA group are folded into
the query axis ([kv_heads, group, dim]), so K/V are never repeated.
What lies in pages of several precisions is attended to part by part (`partial`). All of this is the reference; on a GPU
`KVStep.attend`, of `kernels`, takes its place.
Honoured: scaling, sliding_window, softcap, and s_aux (sinks).

No mask function is registered beside it, so transformers builds no mask; a mask that comes all the same is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from engines.local.kv.shapes import LayerShape
from engines.local.kv.spans import MixedSpan, Span
from engines.local.kv.storage import KVStorage
from engines.local.partial import Scores, attend_parts

IMPLEMENTATION = "turnkeep_paged"

# layer, query [heads, tokens, key_dim], key and value [tokens, kv_heads, dim], scores -> [tokens, heads, value_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor, Scores], Tensor]


@dataclass(slots=True)
class DecodeSpans:
    """The first tokens of the batch: one of each decoding sequence, and where that sequence's K/V lies."""

    spans: tuple[Span | MixedSpan, ...]

    @property
    def count(self) -> int:
        return len(self.spans)


@dataclass(slots=True)
class DecodeTables:
    """The first `count` tokens of the batch: one of each decoding sequence, their page tables as one."""

    count: int
    table: Tensor  # int64 [count * pages], row after row, padded with page 0
    lengths: Tensor  # int64 [count]: K/V to attend to, the token's own included
    longest: int
    equal: bool  # all lengths are `longest`
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window

    def mask(self, window: int | None, width: int, dtype: torch.dtype) -> Tensor | None:
        """Additive [count, 1, 1, width], or None where everything may be seen. The same for every layer of a step."""
        if window not in self.masks:
            if self.equal and width == self.longest and (window is None or window >= self.longest):
                self.masks[window] = None
            else:
                at = torch.arange(width, device=self.lengths.device)
                seen = at < self.lengths[:, None]
                if window is not None:
                    seen &= at >= self.lengths[:, None] - window
                self.masks[window] = _additive(seen, dtype)[:, None, None]
        return self.masks[window]


@dataclass(slots=True)
class Chunk:
    """Tokens start ... stop of the batch: positions past ... past + stop - start of one sequence."""

    start: int
    stop: int
    past: int
    span: Span | MixedSpan  # of all positions before the chunk's end
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return self.past + self.stop - self.start

    def mask(self, window: int | None, like: Tensor) -> Tensor:
        """Additive [tokens, length]: causal from the bottom right, and not further back than the window."""
        if window not in self.masks:
            query = torch.arange(self.past, self.length, device=like.device)[:, None]
            key = torch.arange(self.length, device=like.device)
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            self.masks[window] = _additive(seen, like.dtype)
        return self.masks[window]


@dataclass(slots=True)
class KVStep:
    """What one forward needs to know of the pool; built once, read by every layer."""

    storage: KVStorage
    slots: Tensor  # int64 [tokens]: where each token's K/V is written
    decode: DecodeSpans | DecodeTables | None
    chunks: tuple[Chunk, ...]
    attend: Attend | None = None  # kernels that write and attend in place of what is below
    calls: int = 0


@dataclass(slots=True)
class Probe:
    """Stands in for KVStep in the one-token forward at load; records what each layer sends."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)  # by layer, of the one token [kv_heads, key_dim]
    windows: dict[int, int | None] = field(default_factory=dict)  # by layer: how far back it attends; None: to all
    groups: dict[int, int] = field(default_factory=dict)  # by layer: query heads that share a KV head


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function -> [1, tokens, heads, value_dim]."""
    step: KVStep | Probe = kwargs["kv"]  # KeyError: the model drops **kwargs on the way; the probe finds out
    layer = module.layer_idx
    assert isinstance(layer, int)
    if isinstance(step, Probe):
        step.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        step.keys[layer] = key[0, :, 0]
        step.windows[layer] = kwargs.get("sliding_window")
        step.groups[layer] = query.shape[1] // key.shape[1]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    if attention_mask is not None:
        raise RuntimeError("the model built a dense attention mask in spite of the paged interface")
    step.calls += 1
    scores = Scores(
        scaling if scaling is not None else query.shape[3] ** -0.5,
        kwargs.get("sliding_window"),
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
    )
    if step.attend is not None:
        return step.attend(layer, query[0], key[0].transpose(0, 1), value[0].transpose(0, 1), scores)[None], None
    step.storage.write(layer, step.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if step.decode is not None and not step.chunks:
        return _decode(step.storage, layer, step.decode, query[0], scores)[None], None
    if step.decode is None and len(step.chunks) == 1:
        return _chunk(step.storage, layer, step.chunks[0], query, key, value, scores)[None], None
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    if step.decode is not None:
        count = step.decode.count
        out[:count] = _decode(step.storage, layer, step.decode, query[0, :, :count], scores)
    for chunk in step.chunks:
        at = slice(chunk.start, chunk.stop)
        out[at] = _chunk(step.storage, layer, chunk, query[:, :, at], key[:, :, at], value[:, :, at], scores)
    return out[None], None


def _decode(storage: KVStorage, layer: int, rows: DecodeSpans | DecodeTables, query: Tensor, scores: Scores) -> Tensor:
    """query [heads, rows, dim] -> [rows, heads, value_dim]."""
    heads, count, dim = query.shape
    kv_heads = storage.keys[layer].shape[2]
    folded = query.transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, dim)
    if isinstance(rows, DecodeTables):
        return _decode_tables(storage, layer, rows, folded, scores).reshape(count, heads, -1)
    out = query.new_empty(count, kv_heads, heads // kv_heads, storage.values[layer].shape[3])
    for row, span in enumerate(rows.spans):
        if isinstance(span, MixedSpan):
            out[row] = attend_parts(storage, layer, span, folded[row].unsqueeze(2), span.length - 1, scores)[:, :, 0]
            continue
        key, value = storage.read(layer, span, last=scores.window)
        out[row] = _attend(folded[row : row + 1], key, value, None, scores)[0]
    return out.view(count, heads, -1)


def _decode_tables(storage: KVStorage, layer: int, rows: DecodeTables, query: Tensor, scores: Scores) -> Tensor:
    """query and result [rows, kv_heads, group, dim]."""
    keys = storage.keys[layer].index_select(0, rows.table)
    values = storage.values[layer].index_select(0, rows.table)
    count, kv_heads = query.shape[:2]
    keys = keys.view(count, -1, kv_heads, keys.shape[3])[:, : rows.longest].transpose(1, 2)
    values = values.view(count, -1, kv_heads, values.shape[3])[:, : rows.longest].transpose(1, 2)
    return _attend(query, keys, values, rows.mask(scores.window, rows.longest, query.dtype), scores)


def _chunk(
    storage: KVStorage, layer: int, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, scores: Scores
) -> Tensor:
    """query [1, heads, tokens, dim] -> [tokens, heads, value_dim]."""
    heads, tokens = query.shape[1], query.shape[2]
    kv_heads = key.shape[1]
    if isinstance(chunk.span, MixedSpan):
        grouped_query = query.reshape(kv_heads, heads // kv_heads, tokens, -1)
        return attend_parts(storage, layer, chunk.span, grouped_query, chunk.past, scores).flatten(0, 1).transpose(0, 1)
    if chunk.past:
        key, value = storage.read(layer, chunk.span)
    if scores.plain:
        causal = not chunk.past and (scores.window is None or scores.window >= chunk.length)
        mask = None if causal else chunk.mask(scores.window, query)
        grouped = heads != kv_heads
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scores.scale, enable_gqa=grouped
        )
        return out[0].transpose(0, 1)
    group = heads // kv_heads
    folded = query.reshape(1, kv_heads, group * tokens, -1)
    mask = chunk.mask(scores.window, query).repeat(group, 1)[None, None]
    out = _attend(folded, key, value, mask, scores)
    return out.reshape(heads, tokens, -1).transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """query [n, kv_heads, group * tokens, dim] (heads of a group one after the other) -> the same with value_dim."""
    if scores.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
    logits = torch.matmul(query, key.transpose(-1, -2)) * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    if mask is not None:
        logits = logits + mask
    if scores.sinks is None:
        weights = torch.softmax(logits, -1, dtype=torch.float32)
    else:  # one more column that takes weight and gives nothing
        kv_heads, rows = logits.shape[1], logits.shape[2]
        group = len(scores.sinks) // kv_heads
        sinks = scores.sinks.to(logits.dtype).view(1, kv_heads, group, 1, 1)
        sinks = sinks.expand(logits.shape[0], -1, -1, rows // group, 1).reshape(logits.shape[0], kv_heads, rows, 1)
        weights = torch.softmax(torch.cat((logits, sinks), -1), -1, dtype=torch.float32)[..., :-1]
    return torch.matmul(weights.to(query.dtype), value)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers; can be repeated."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
