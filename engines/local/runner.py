"""One forward over a plan: builds the step's tensors once, calls the model, returns logits. Knows no policy."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engines.local.attention import Chunk, DecodeSpans, DecodeTables, KVStep
from engines.local.kv.storage import KVStorage
from engines.local.model import LoadedModel
from engines.local.scheduler import Row


class Runner:
    def __init__(self, model: LoadedModel, storage: KVStorage) -> None:
        self._model = model
        self._storage = storage

    @torch.inference_mode()
    def run(self, rows: Seq[Row]) -> Tensor:
        """Write the K/V of all `rows` (those with one token first) -> logits [rows that sample, vocab], float32."""
        ids, positions, slots, last = self._flat(rows)
        step = KVStep(self._storage, slots, self._decode_rows(rows), self._chunks(rows))
        logits = self._model.forward(ids[None], positions[None], last, step)
        if step.calls != self._storage.num_layers:
            raise RuntimeError(f"the model attended {step.calls} times, it has {self._storage.num_layers} layers")
        return logits[0].float()

    def _flat(self, rows: Seq[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids, positions, slots [tokens] and the indices of the sampling rows' last tokens, all int64."""
        size = self._storage.block_size
        total = sum(row.count for row in rows)
        ids, positions, slots = (np.empty(total, np.int64) for _ in range(3))
        last: list[int] = []
        at = 0
        for row in rows:
            seq, start, end = row.seq, row.seq.written, row.seq.written + row.count
            if row.count == 1:
                ids[at], positions[at] = seq.tokens[start], start
                slots[at] = seq.table[start // size] * size + start % size
            else:
                span = slice(at, at + row.count)
                where = np.arange(start, end)
                ids[span] = seq.tokens[start:end]
                positions[span] = where
                slots[span] = np.array(seq.table, np.int64)[where // size] * size + where % size
            at += row.count
            if row.samples:
                last.append(at - 1)
        # a step in which nobody samples still needs one row: an empty product is not every model's case
        return self._tensor(ids), self._tensor(positions), self._tensor(slots), self._tensor(np.array(last or [at - 1]))

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
