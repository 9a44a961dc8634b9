"""One forward over a plan: builds the step's tensors once, calls the model, returns logits. Knows no policy.

rows     | few tokens each, together at most native.MOST_TOKENS | the rest |
           the compiled decoder, where there is one               transformers' code

A row that the decoder runs gives the same bits beside any other rows; the rest are one ragged batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engines.local.attention import Chunk, DecodeSpans, DecodeTables, KVStep
from engines.local.kernels.path import DecodeGraphs, KernelPath, KernelRow
from engines.local.kv.storage import KVStorage
from engines.local.model import LoadedModel
from engines.local.native.decoder import MOST_TOKENS, NativeDecoder, Tokens
from engines.local.scheduler import Row


@dataclass(frozen=True, slots=True)
class Logits:
    """float32 [n, vocab] each, row after row of the plan."""

    sampled: Tensor  # of each row that samples: one, and one for each token of its draft
    scored: Tensor  # of the tokens that are scored


@dataclass(frozen=True, slots=True)
class _Flat:
    """A batch as one list of tokens, int64 all."""

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    sampled: list[int]  # indices of tokens
    scored: list[int]


class Runner:
    def __init__(
        self,
        model: LoadedModel,
        storage: KVStorage,
        native: NativeDecoder | None = None,
        kernels: KernelPath | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`kernels` None: transformers' code attends in torch. `graphs`: steps that only decode are replayed."""
        self._model = model
        self._storage = storage
        self._native = native
        self._kernels = kernels
        self._graphs = graphs

    @torch.inference_mode()
    def run(self, rows: Seq[Row]) -> Logits:
        """Write the K/V of all `rows`, those with one token first."""
        few, rest = self._split(rows)
        if not rest:
            return Logits(self._run_native(few), torch.empty(0, self._model.vocab_size))
        logits = self._run_torch(rest)
        if not few:
            return logits
        return Logits(_in_order(rows, few, self._run_native(few), rest, logits.sampled), logits.scored)

    def _split(self, rows: Seq[Row]) -> tuple[list[Row], list[Row]]:
        few: list[Row] = []
        rest: list[Row] = []
        room = MOST_TOKENS if self._native is not None else 0
        for row in rows:
            fits = row.count <= room and not row.seq.scored(row.count) and self._storage.is_full(row.seq.table)
            (few if fits else rest).append(row)
            room -= row.count if fits else 0
        return few, rest

    def _run_native(self, rows: Seq[Row]) -> Tensor:
        assert self._native is not None
        flat = self._flat(rows)
        tables = [np.frombuffer(row.seq.table, np.int32) for row in rows for _ in range(row.count)]
        keep = np.array(flat.sampled, np.int64)
        return self._native.run(Tokens(flat.ids, flat.positions, flat.slots, tables, keep))

    def _run_torch(self, rows: Seq[Row]) -> Logits:
        flat = self._flat(rows)
        if (replayed := self._replay(rows, flat)) is not None:
            return Logits(replayed[flat.sampled], replayed[:0])
        slots = self._tensor(flat.slots)
        if self._kernels is not None:
            step = KVStep(self._storage, slots, None, (), self._kernels.step(self._kernel_rows(rows), slots))
        else:
            step = KVStep(self._storage, slots, self._decode_rows(rows), self._chunks(rows))
        # a step in which nobody samples still needs one row: an empty product is not every model's case
        wanted = flat.sampled + flat.scored or [len(flat.ids) - 1]
        keep = self._tensor(np.array(wanted, np.int64))
        logits = self._model.forward(self._tensor(flat.ids)[None], self._tensor(flat.positions)[None], keep, step)
        if step.calls != self._storage.num_layers:
            raise RuntimeError(f"the model attended {step.calls} times, it has {self._storage.num_layers} layers")
        sampled = len(flat.sampled)
        return Logits(logits[0, :sampled].float(), logits[0, sampled:].float())

    def _replay(self, rows: Seq[Row], flat: _Flat) -> Tensor | None:
        """Logits of every row, where this step is one that is recorded."""
        if self._graphs is None or not self._graphs.takes(len(rows)) or len(flat.ids) != len(rows) or flat.scored:
            return None
        return self._graphs.run(flat.ids, flat.positions, flat.slots, self._kernel_rows(rows))

    def _flat(self, rows: Seq[Row]) -> _Flat:
        size = self._storage.block_size
        total = sum(row.count for row in rows)
        ids, positions, slots = (np.empty(total, np.int64) for _ in range(3))
        sampled: list[int] = []
        scored: list[int] = []
        at = 0
        for row in rows:
            seq, start, end = row.seq, row.seq.written, row.seq.written + row.count
            if row.count == 1:
                ids[at], positions[at] = seq.tokens[start], start
                slots[at] = seq.table[start // size] * size + start % size
            else:
                span = slice(at, at + row.count)
                where = np.arange(start, end)
                ids[span] = row.ids
                positions[span] = where
                slots[span] = np.array(seq.table, np.int64)[where // size] * size + where % size
            scored += [at + position - start for position in seq.scored(row.count)]
            at += row.count
            sampled += range(at - row.num_sampled, at)
        return _Flat(ids, positions, slots, sampled, scored)

    def _kernel_rows(self, rows: Seq[Row]) -> list[KernelRow]:
        size = self._storage.block_size
        laid: list[KernelRow] = []
        first = 0
        for row in rows:
            start = row.seq.written
            table = np.array(row.seq.table[: -(-(start + row.count) // size)], np.int64)
            laid.append(KernelRow(table, first, row.count, start))
            first += row.count
        return laid

    def _decode_rows(self, rows: Seq[Row]) -> DecodeSpans | DecodeTables | None:
        decoding = [row.seq for row in rows if row.count == 1]
        if not decoding:
            return None
        size = self._storage.block_size
        lengths = [seq.written + 1 for seq in decoding]
        tables = [
            np.array(seq.table[: -(-length // size)], np.int64) for seq, length in zip(decoding, lengths, strict=True)
        ]
        if self._storage.device.type == "cpu":
            return DecodeSpans(tuple(map(self._storage.span, tables, lengths)))
        padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        longest, equal = max(lengths), min(lengths) == max(lengths)
        return DecodeTables(len(tables), self._tensor(padded.ravel()), self._tensor(np.array(lengths)), longest, equal)

    def _chunks(self, rows: Seq[Row]) -> tuple[Chunk, ...]:
        size = self._storage.block_size
        chunks: list[Chunk] = []
        at = 0
        for row in rows:
            if row.count > 1:
                past = row.seq.written
                table = np.array(row.seq.table[: -(-(past + row.count) // size)], np.int64)
                chunks.append(Chunk(at, at + row.count, past, self._storage.span(table, past + row.count)))
            at += row.count
        return tuple(chunks)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._storage.device)


def _in_order(rows: Seq[Row], few: Seq[Row], few_logits: Tensor, rest: Seq[Row], rest_logits: Tensor) -> Tensor:
    """Sampled logits of two batches in the order of `rows`."""
    parts: dict[int, Tensor] = {}
    for batch, logits in ((few, few_logits), (rest, rest_logits)):
        counts = [row.num_sampled for row in batch]
        parts |= {id(row): part for row, part in zip(batch, torch.split(logits, counts), strict=True)}
    return torch.cat([parts[id(row)] for row in rows])
