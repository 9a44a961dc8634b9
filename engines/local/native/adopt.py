"""Whether the compiled decoder may stand beside a model: it must give what transformers' code gives on some tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engines.local.attention import Chunk, KVStep
from engines.local.kv.storage import KVStorage
from engines.local.model import LoadedModel
from engines.local.native.build import CannotBuild
from engines.local.native.decoder import MOST_TOKENS, NativeDecoder, NotNative, Tokens, refuse

CHECKED = 24  # tokens
TOLERANCE = 2e-4  # of the largest number: what another order of sums makes of float32, with room


def native_decoder(model: LoadedModel, storage: KVStorage, wanted: str) -> tuple[NativeDecoder | None, str | None]:
    """The decoder over `storage`, or None and why not. ValueError where it is `wanted` "native" and cannot be."""
    if wanted == "torch":
        return None, "kernels is torch"
    try:
        refuse(model.module, storage)
        threads = torch.get_num_threads()
        _compare(model, storage.block_size, threads)
        return NativeDecoder(model.module, storage, model.windows, threads), None
    except (NotNative, CannotBuild) as reason:
        if wanted == "native":
            raise ValueError(f"kernels is native: {reason}") from reason
        return None, str(reason)


@torch.inference_mode()
def _compare(model: LoadedModel, block_size: int, threads: int) -> None:
    """Run the same tokens both ways, in pages of their own. Raises NotNative where they differ."""
    pages = -(-CHECKED // block_size)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, CHECKED)
    positions, table = np.arange(CHECKED), np.arange(1, pages + 1)
    slots = table[positions // block_size] * block_size + positions % block_size
    storages = [
        KVStorage(model.shapes, pages, block_size, dtype=model.dtype, device=model.device) for _ in ("torch", "native")
    ]
    chunk = Chunk(0, CHECKED, 0, storages[0].span(table, CHECKED))
    step = KVStep(storages[0], torch.from_numpy(slots), None, (chunk,))
    tensors = [torch.from_numpy(array) for array in (ids, positions)]
    right = model.forward(tensors[0][None], tensors[1][None], torch.arange(CHECKED), step)[0]
    decoder = NativeDecoder(model.module, storages[1], model.windows, threads)
    paths = [table.astype(np.int32)] * CHECKED
    assert CHECKED <= MOST_TOKENS
    got = decoder.run(Tokens(ids, positions, slots, paths, np.arange(CHECKED)))
    _refuse_difference("logits", right, got)
    for layer in model.shapes:
        for what in ("keys", "values"):
            _refuse_difference(f"{what} of layer {layer}", *(getattr(one, what)[layer] for one in storages))


def _refuse_difference(what: str, right: Tensor, got: Tensor) -> None:
    most = float((right - got).abs().max())
    if not most <= TOLERANCE * max(float(right.abs().max()), 1.0):
        raise NotNative(f"its {what} differ by {most:.1e} from those of transformers")
