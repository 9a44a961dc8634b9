"""The compiled decoder over a model's own weights and the pool's own pages: a forward over a few tokens on a CPU.

Taken only for models whose layers it knows, and only where it gives what transformers' code gives: at load some tokens
are run by both, and logits, keys and values must be equal up to rounding. What a token gives does not depend on the
others of its step, bit for bit. Weights are not copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p, cast
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engines.local.kv.storage import KVStorage
from engines.local.native.build import native_library

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOST_TOKENS = 32  # of one step: beyond, transformers' products of many rows are as fast
LANES = 16  # floats of the widest vector: every width must be a multiple
MOST_DIM = 256


class NotNative(Exception):
    """This model is not run by the compiled decoder; says why."""


class _Matrix(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("columns", c_int64)]


_NORMS = ("norm_in", "norm_mid", "norm_query", "norm_key")
_MATRICES = ("query", "key", "value", "out", "gate", "up", "down")


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in _NORMS),
        *((name, _Matrix) for name in _MATRICES),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    ]


_SIZES = ("layers", "hidden", "heads", "kv_heads", "dim", "inner", "block_size", "most_tokens")


class _Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in _SIZES),
        ("eps", c_float),
        ("scale", c_float),
        ("layer", POINTER(_Layer)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", _Matrix),
    ]


class _Step(Structure):
    _fields_ = [
        ("tokens", c_int64),
        ("kept", c_int64),
        *((name, c_void_p) for name in ("ids", "slots", "lengths", "tables", "cosine", "sine", "keep", "logits")),
    ]


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a forward runs: token i of the batch, with where its K/V goes and where that of its path lies."""

    ids: np.ndarray  # int64 [tokens]
    positions: np.ndarray  # int64 [tokens]
    slots: np.ndarray  # int64 [tokens]
    tables: Sequence[np.ndarray]  # int32, of each token: the pages of its path, its own included
    keep: np.ndarray  # int64: tokens whose logits are wanted


@dataclass(slots=True)
class _Kept:
    """Everything the library points to."""

    tensors: list[Tensor] = field(default_factory=list)

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise NotNative("its weights are no contiguous float32 on the CPU")
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def matrix(self, linear: nn.Module) -> _Matrix:
        weight, bias = linear.weight, getattr(linear, "bias", None)
        assert isinstance(weight, Tensor)
        rows, columns = weight.shape
        if columns % LANES:
            raise NotNative(f"a width of {columns} is no multiple of {LANES}")
        return _Matrix(self.pointer(weight.detach()), self.pointer(_plain(bias)), rows, columns)


def _plain(parameter: Any) -> Tensor | None:
    return parameter.detach() if isinstance(parameter, Tensor) else None


class NativeDecoder:
    """`module` and `storage` are kept alive and not copied. Raises NotNative, CannotBuild."""

    def __init__(self, module: Any, storage: KVStorage, windows: Mapping[int, int | None], threads: int) -> None:
        refuse(module, storage)
        self._library = native_library()
        self._library.decoder_new.restype = c_void_p
        self._library.decoder_new.argtypes = (POINTER(_Model), c_int)
        self._library.decoder_run.restype = None
        self._library.decoder_run.argtypes = (c_void_p, POINTER(_Step))
        self._library.decoder_free.restype = None
        self._library.decoder_free.argtypes = (c_void_p,)
        self._kept = _Kept()
        self._module, self._storage = module, storage
        self._vocab = module.lm_head.weight.shape[0]
        model = self._model(module, storage, windows)
        self._decoder = self._library.decoder_new(byref(model), threads)
        self._end = weakref.finalize(self, self._library.decoder_free, self._decoder)

    def _model(self, module: Any, storage: KVStorage, windows: Mapping[int, int | None]) -> _Model:
        body, kept = module.model, self._kept
        attention, layers = body.layers[0].self_attn, body.layers
        described = (_Layer * len(layers))()
        for number, layer in enumerate(layers):
            attend, mlp = layer.self_attn, layer.mlp
            described[number] = _Layer(
                kept.pointer(layer.input_layernorm.weight.detach()),
                kept.pointer(layer.post_attention_layernorm.weight.detach()),
                kept.pointer(_weight(attend, "q_norm")),
                kept.pointer(_weight(attend, "k_norm")),
                *(kept.matrix(getattr(attend, f"{name}_proj")) for name in "qkvo"),
                *(kept.matrix(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down")),
                kept.pointer(storage.keys[number]),
                kept.pointer(storage.values[number]),
                windows.get(number) or 0,
            )
        self._layers = described
        dim = storage.keys[0].shape[3]
        return _Model(
            len(layers),
            body.embed_tokens.weight.shape[1],
            described[0].query.rows // dim,
            storage.keys[0].shape[2],
            dim,
            described[0].gate.rows,
            storage.block_size,
            MOST_TOKENS,
            body.norm.variance_epsilon,
            attention.scaling,
            described,
            kept.pointer(body.embed_tokens.weight.detach()),
            kept.pointer(body.norm.weight.detach()),
            kept.matrix(module.lm_head),
        )

    @torch.inference_mode()
    def run(self, given: Tokens) -> Tensor:
        """Write the K/V of at most MOST_TOKENS tokens -> logits of those to keep, float32 [kept, vocab]."""
        count = len(given.ids)
        assert 0 < count <= MOST_TOKENS
        positions = torch.from_numpy(given.positions)[None]
        cosine, sine = self._module.model.rotary_emb(self._module.lm_head.weight, positions)
        cosine, sine = cosine.contiguous(), sine.contiguous()
        logits = torch.empty(len(given.keep), self._vocab)
        lengths = given.positions + 1
        tables = (c_void_p * count)(*(table.ctypes.data for table in given.tables))
        step = _Step(
            count,
            len(given.keep),
            given.ids.ctypes.data,
            given.slots.ctypes.data,
            lengths.ctypes.data,
            cast(tables, c_void_p),
            cosine.data_ptr(),
            sine.data_ptr(),
            given.keep.ctypes.data,
            logits.data_ptr(),
        )
        self._library.decoder_run(self._decoder, byref(step))
        return logits


def refuse(module: Any, storage: KVStorage) -> None:
    """Raise NotNative for what the decoder does not know."""
    name = type(module).__name__
    if name not in MODELS:
        raise NotNative(f"{name} is none of {', '.join(MODELS)}")
    if storage.device.type != "cpu" or storage.dtype != torch.float32:
        raise NotNative(f"it runs in {storage.dtype} on {storage.device}, not in float32 on a CPU")
    if module.config.hidden_act != "silu":
        raise NotNative(f"its activation is {module.config.hidden_act}")
    shapes = {(*keys.shape[2:], storage.values[layer].shape[3]) for layer, keys in storage.keys.items()}
    if len(shapes) != 1:
        raise NotNative("its layers hold K/V of different shapes")
    _, dim, value_dim = shapes.pop()
    if dim != value_dim or dim % LANES or dim > MOST_DIM:
        raise NotNative(f"its heads have {dim} and {value_dim} dimensions")


def _weight(module: nn.Module, name: str) -> Tensor | None:
    part = getattr(module, name, None)
    return part.weight.detach() if part is not None else None
