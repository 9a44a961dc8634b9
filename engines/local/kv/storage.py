"""The tensors of the pool: per layer, keys and values of every page. Knows no requests and no index.

keys[layer]    [pages, block_size, kv_heads, key_dim]       slot = page * block_size + position % block_size
values[layer]  [pages, block_size, kv_heads, value_dim]     both of full pages; `sealed` holds those of fewer bits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engines.local.kv.memory import Memory, reserve
from engines.local.kv.pool import Pages, Slots
from engines.local.kv.precision import Precision
from engines.local.kv.quant import UNIT, codecs
from engines.local.kv.sealed import Arena, Codecs, Encode, encode_into
from engines.local.kv.shapes import LayerShape
from engines.local.kv.spans import MixedSpan, Part, Span, cut, is_run
from engines.local.kv.units import Units
from engines.local.rope import Rotation, Rotations


class KVStorage:
    """Page 0 stays zero: padding reads it. With `units` there are sealed pages beside the full ones; on a CPU, memory
    that neither takes is given back."""

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_pages: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rotations: Rotations | None = None,
        nan_fill: bool = False,
        units: Units | None = None,
        codecs: Codecs = codecs,
        encode: Encode = encode_into,
    ) -> None:
        self._memory: list[Memory] = []
        counts = units.count if units is not None else {}
        self._units = units if counts else None

        def empty(heads: int, dim: int) -> Tensor:
            shape = (num_pages + 1, block_size, heads, dim)
            if not counts:
                return torch.zeros(shape, dtype=dtype, device=device)
            self._memory.append(reserve(torch.Size(shape).numel() * dtype.itemsize, device))
            return self._memory[-1].bytes.view(dtype).view(shape)

        self.block_size = block_size
        self.num_layers = len(shapes)
        self.device = device
        self.dtype = dtype
        self.keys = {layer: empty(shape.kv_heads, shape.key_dim) for layer, shape in shapes.items()}
        self.values = {layer: empty(shape.kv_heads, shape.value_dim) for layer, shape in shapes.items()}
        self.key_slots = {layer: pages.flatten(0, 1) for layer, pages in self.keys.items()}
        self.value_slots = {layer: pages.flatten(0, 1) for layer, pages in self.values.items()}
        self.arenas = {
            precision: Arena(shapes, codecs, precision, count, encode, device) for precision, count in counts.items()
        }
        self._rotations = rotations or {}
        self._nan_fill = nan_fill
        if nan_fill:
            for pages in self._all():
                pages[1:] = torch.nan

    @property
    def units(self) -> Units | None:
        """The books of its sealed pages; None where there are none."""
        return self._units

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """`key` [tokens, kv_heads, key_dim], `value` likewise, to `slots` [tokens] int64."""
        self.key_slots[layer].index_copy_(0, slots, key)
        self.value_slots[layer].index_copy_(0, slots, value)

    def span(self, table: np.ndarray, length: int) -> Span | MixedSpan:
        """Of a page table, int64, one entry for each page of `length` tokens."""
        if self._units is not None and int(table.max()) > self._units.num_pages:
            return cut(table, length, self._units, self.block_size, self.device)
        if is_run(table):
            return Span(length, int(table[0]) * self.block_size, None)
        return Span(length, None, torch.from_numpy(table).to(self.device))

    def is_full(self, table: Sequence[int]) -> bool:
        """Whether all pages of a table are full ones."""
        return self._units is None or max(table) <= self._units.num_pages

    def read(self, layer: int, span: Span, *, last: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv_heads, tokens, dim] of the span, or of its `last` tokens.

        Where the pages are one run nothing is copied: what comes back is the pool itself, to be read at once.
        """
        start = max(span.length - last, 0) if last is not None else 0
        if span.slot is not None:
            at = slice(span.slot + start, span.slot + span.length)
            keys, values = self.key_slots[layer][at], self.value_slots[layer][at]
        else:
            assert span.pages is not None
            keys = self.keys[layer].index_select(0, span.pages).flatten(0, 1)[start : span.length]
            values = self.values[layer].index_select(0, span.pages).flatten(0, 1)[start : span.length]
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def read_part(self, layer: int, part: Part, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [kv_heads, tokens, dim] of tokens start ... stop of a part, and what the values are to be
        turned back by (multiplied with its transpose), if anything.

        Sealed pages are decoded here, so what is asked for at once is what is held decoded at once.
        """
        if part.full is not None:
            keys, values = self.read(layer, Span(stop, part.full.slot, part.full.pages), last=stop - start)
            return keys[0], values[0], None
        assert part.units is not None
        first, last = (part.skip + start) // UNIT, -(-(part.skip + stop) // UNIT)
        arena = self.arenas[part.precision]
        keys, values = arena.read(layer, part.units[first:last], self.dtype)
        at = slice(part.skip + start - first * UNIT, part.skip + stop - first * UNIT)
        return (
            keys.flatten(0, 1)[at].transpose(0, 1),
            values.flatten(0, 1)[at].transpose(0, 1),
            arena.turn(layer),
        )

    def seal(self, source: Pages, target: Pages) -> bool:
        """Encode one unit's pages, `source` (full, or of another precision), as `target`; False where that cannot be
        (an element that is too large), and `target` holds nothing then."""
        assert self._units is not None
        precision, unit, _ = self._units.place(int(target[0]))
        part = cut(source.astype(np.int64), UNIT, self._units, self.block_size, self.device).parts
        assert len(part) == 1, "the pages are no unit"

        def read(layer: int) -> tuple[Tensor, Tensor]:
            keys, values, turn = self.read_part(layer, part[0], 0, UNIT)
            if turn is not None:
                values = (values.float() @ turn.T).to(values.dtype)
            return keys.transpose(0, 1), values.transpose(0, 1)

        return self.arenas[precision].write(unit, read)

    def freed(self, pages: Pages) -> None:
        full = self._full(pages)
        if self._nan_fill:
            self._fill(full, torch.nan)
        elif self._units is not None:
            for start, stop in _runs(full):
                for memory, tensor in zip(self._memory, self._all(), strict=True):
                    page_bytes = tensor[0].nbytes
                    memory.discard(start * page_bytes, stop * page_bytes)
        if self._units is not None:
            for precision, unit in {self._place(page)[:2] for page in self._sealed(pages)}:
                self.arenas[precision].discard(unit)

    def allocated(self, pages: Pages) -> None:
        if self._nan_fill:  # a masked slot still meets its value with weight 0, and 0 * NaN is NaN
            self._fill(pages, 0.0)

    def zero(self, pages: Pages) -> None:
        self._fill(self._full(pages), 0.0)
        for precision, unit, block in map(self._place, self._sealed(pages)):
            start = block * self.block_size
            self.arenas[precision].zero(unit, start, start + self.block_size)

    @property
    def page_bytes(self) -> int:
        return sum(tensor[0].nbytes for tensor in self._all())

    def pack(self, pages: Pages) -> Tensor:
        """Content of full pages, uint8 [pages, page_bytes] on the CPU: the keys of all layers, then the values."""
        index = torch.from_numpy(pages).to(self.device, torch.int64)
        packed = torch.empty(len(pages), self.page_bytes, dtype=torch.uint8, device=self.device)
        for start, tensor in self._places():
            content = tensor.index_select(0, index).flatten(1).view(torch.uint8)
            packed[:, start : start + content.shape[1]] = content
        return packed.cpu()

    def unpack(self, packed: Tensor, pages: Pages) -> None:
        """The inverse of `pack`."""
        index = torch.from_numpy(pages).to(self.device, torch.int64)
        packed = packed.to(self.device)
        for start, tensor in self._places():
            content = packed[:, start : start + tensor[0].nbytes].contiguous().view(tensor.dtype)
            tensor.index_copy_(0, index, content.view(len(pages), *tensor.shape[1:]))

    def pack_unit(self, page: int) -> Tensor:
        """Codes and metadata of the unit that sealed `page` belongs to, uint8 [unit bytes] on the CPU."""
        precision, unit, _ = self._place(page)
        return self.arenas[precision].bytes[unit].cpu()

    def unpack_unit(self, packed: Tensor, page: int) -> None:
        """The inverse of `pack_unit`."""
        precision, unit, _ = self._place(page)
        self.arenas[precision].bytes[unit] = packed.to(self.device)

    def unit_bytes(self) -> dict[Precision, int]:
        """Of one unit, by precision that there is room for."""
        return {precision: arena.unit_bytes for precision, arena in self.arenas.items()}

    def blank(self, packed: Tensor, num_slots: int) -> None:
        """Zero one packed page, uint8 [page_bytes], from slot `num_slots` on."""
        for start, tensor in self._places():
            packed[start + num_slots * tensor[0, 0].nbytes : start + tensor[0].nbytes] = 0

    def _places(self) -> Iterator[tuple[int, Tensor]]:
        """Where each layer's keys, then values, begin in a packed page."""
        start = 0
        for tensor in self._all():
            yield start, tensor
            start += tensor[0].nbytes

    def _full(self, pages: Pages) -> Pages:
        return pages if self._units is None else pages[pages <= self._units.num_pages]

    def _sealed(self, pages: Pages) -> list[int]:
        return [] if self._units is None else self._units.sealed(pages).tolist()

    def _place(self, page: int) -> tuple[Precision, int, int]:
        assert self._units is not None
        return self._units.place(page)

    def copy(self, source: int, target: int, num_slots: int) -> None:
        for pages in self._all():
            pages[target, :num_slots] = pages[source, :num_slots]

    @torch.inference_mode()
    def move(self, source: Slots, target: Slots, old: int, new: int) -> None:
        """Values as they are; keys turned from positions old, old + 1, ... to new, new + 1, ..."""
        at, to = (torch.from_numpy(slots).to(self.device) for slots in (source, target))
        before, after = (torch.arange(first, first + len(source), device=self.device) for first in (old, new))
        angles: dict[int, tuple[Tensor, Tensor]] = {}
        turned: Rotation | None
        for layer, turned in self._rotations.items():
            keys = self.key_slots[layer].index_select(0, at)
            if turned is not None:
                if id(turned) not in angles:
                    angles[id(turned)] = turned.angles(before, after)
                keys = turned.turned(keys, angles[id(turned)])
            self.key_slots[layer].index_copy_(0, to, keys)
            self.value_slots[layer].index_copy_(0, to, self.value_slots[layer].index_select(0, at))

    def _fill(self, pages: Pages, value: float) -> None:
        if len(pages):
            index = torch.from_numpy(pages).to(self.device, torch.int64)
            for tensor in self._all():
                tensor.index_fill_(0, index, value)

    def _all(self) -> list[Tensor]:
        return [*self.keys.values(), *self.values.values()]


def _runs(pages: Pages) -> Iterator[tuple[int, int]]:
    """Half-open runs of consecutive pages."""
    if len(pages):
        ordered = np.sort(pages)
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1
