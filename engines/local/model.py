"""A transformers causal LM under our attention: loaded, probed, or refused with the reason.

No model code of ours: the model runs as transformers wrote it, with `attn_implementation` set to the paged function.
A one-token forward at load (the probe) records the K/V shape of every layer. What a paged, packed batch would
serve wrongly is refused here and not found out by a user:

    attention not through AttentionInterface                          bloom, stablelm
    layers that do not attend (recurrent or convolutional state)      lfm2 with conv layers, linear hybrids
    rope whose frequencies depend on the batch (dynamic, longrope)    a batch mate would change your keys
    encoder-decoder models
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engines.contract import EngineError
from engines.local.attention import IMPLEMENTATION, KVStep, Probe, register
from engines.local.kv.shapes import LayerShape, bytes_per_token
from engines.local.learn_rope import CannotShift, learn_rotations, rope_settings
from engines.local.linear import favour_few_rows
from engines.local.rope import Rotations

BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class ModelRefused(EngineError):
    """This model cannot be served rightly; says why."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    module: nn.Module
    tokenizer: Any  # transformers' tokenizer; None for a model that is driven by ids alone
    decode: Callable[[list[int]], str]  # ids -> text without special tokens, nothing tidied up
    window: int  # tokens
    vocab_size: int  # rows of the input embedding
    stop_ids: frozenset[int]  # end-of-sequence ids of the model's generation config
    shapes: Mapping[int, LayerShape]
    dtype: torch.dtype
    device: torch.device
    rotations: Rotations = field(default_factory=dict)  # of every layer's keys, for the KV shift
    attention_tokens: float = math.inf  # context at which attending costs a token as much as the weights do
    windows: Mapping[int, int | None] = field(default_factory=dict)  # by layer: how far back it attends; None: to all
    group: int = 1  # query heads that share a KV head, the most of any layer
    no_shift: str | None = "not looked at"  # why its keys cannot be moved; None: they can

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.shapes, self.dtype)

    def spell(self, token_id: int) -> str:
        """One token as text, special tokens by name."""
        return self.decode([token_id]) if self.tokenizer is None else str(self.tokenizer.decode([token_id]))

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor, kv: KVStep | Probe) -> Tensor:
        """ids and positions [1, tokens], keep [n] (indices of tokens) -> logits [1, n, vocab]."""
        return _forward(self.module, ids, positions, keep, kv)


def load_model(source: str | Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> LoadedModel:
    """Weights and tokenizer from a local folder or by name. `dtype` None: float32 on a CPU, else the weights' own.

    Raises ModelRefused where ENGINE cannot serve the model, OSError where there is none.
    """
    register()
    wanted: torch.dtype | str = dtype or (torch.float32 if device == "cpu" else "auto")
    tokenizer = AutoTokenizer.from_pretrained(source)
    try:
        module = _from_pretrained(source, device, wanted)
    except ValueError as error:
        raise ModelRefused(f"{source}: {error}") from error

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return adopt(module, name=str(source), tokenizer=tokenizer, decode=decode)


def _from_pretrained(source: str | Path, device: str, dtype: torch.dtype | str) -> Any:
    """A quantized checkpoint goes through transformers' quantizer of its method, straight to the device: most of them
    cannot be moved. ValueError where that method is not to be had here."""
    config = AutoConfig.from_pretrained(source)
    load: Any = partial(AutoModelForCausalLM.from_pretrained, source, dtype=dtype, attn_implementation=IMPLEMENTATION)
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return load().to(torch.device(device))
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    try:
        return load(device_map={"": device})
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"its weights are quantized ({method}), which cannot be loaded here: {error}") from error


def adopt(
    module: Any, *, name: str, decode: Callable[[list[int]], str], tokenizer: Any = None, window: int | None = None
) -> LoadedModel:
    """Take a transformers model that is already in memory; it is switched to the paged attention."""
    register()
    module.eval()
    config = module.config.get_text_config()
    refuse_config(name, module, config)
    try:
        module.set_attn_implementation(IMPLEMENTATION)
    except ValueError as error:
        raise ModelRefused(f"{name}: {error}") from error
    window = window or getattr(config, "max_position_embeddings", None)
    if window is None:
        raise ModelRefused(f"{name}: the config names no window (max_position_embeddings)")
    weights = module.get_input_embeddings().weight
    favour_few_rows(module)
    layers = config.num_hidden_layers
    seen = probe(module, name, layers)
    shapes = dict(sorted(seen.shapes.items()))
    rotations: Rotations = {}
    no_shift = None
    try:
        rotations = learn_rotations(module, config, window, lambda position: probe(module, name, layers, position))
    except CannotShift as reason:
        no_shift = str(reason)
    return LoadedModel(
        name=name,
        module=module,
        tokenizer=tokenizer,
        decode=decode,
        window=window,
        vocab_size=weights.shape[0],
        stop_ids=_stop_ids(module, config),
        shapes=shapes,
        dtype=weights.dtype,
        device=weights.device,
        rotations=rotations,
        attention_tokens=_attention_tokens(module, config, shapes),
        windows=seen.windows,
        group=max(seen.groups.values()),
        no_shift=no_shift,
    )


def refuse_config(name: str, module: Any, config: Any) -> None:
    """Raise ModelRefused for what class and config already tell."""
    if module.config.is_encoder_decoder:
        raise ModelRefused(f"{name}: encoder-decoder models are not served")
    if not module._supports_attention_backend:
        raise ModelRefused(f"{name}: {type(module).__name__} does not attend through AttentionInterface")
    for rope in rope_settings(config):
        if rope.get("rope_type") in BATCH_DEPENDENT_ROPE:
            raise ModelRefused(
                f"{name}: rope_type {rope['rope_type']!r} takes its frequencies from the longest sequence of the "
                "batch, so one request's cached keys would depend on the others"
            )


@torch.inference_mode()
def probe(module: Any, name: str, num_layers: int, position: int = 0) -> Probe:
    """Run one token at `position` and see what every layer sends. Raises ModelRefused unless each attends through
    us."""
    seen = Probe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=module.get_input_embeddings().weight.device)
    try:
        _forward(module, zero + 1, zero + position, zero[0], seen)
    except KeyError as error:
        if error.args != ("kv",):
            raise
        raise ModelRefused(f"{name}: {type(module).__name__} drops the attention's keyword arguments") from error
    if sorted(seen.shapes) != list(range(num_layers)):
        raise ModelRefused(
            f"{name}: {len(seen.shapes)} of {num_layers} layers attend; the others keep recurrent or other state"
        )
    return seen


def _forward(module: nn.Module, ids: Tensor, positions: Tensor, keep: Tensor, kv: KVStep | Probe) -> Tensor:
    out = module(
        input_ids=ids,
        position_ids=positions,
        attention_mask=None,
        use_cache=False,  # None would mean the config's True: a cache growing beside our pages
        logits_to_keep=keep,
        kv=kv,
    )
    logits = out.logits
    assert isinstance(logits, Tensor)
    return logits


def _attention_tokens(module: Any, config: Any, shapes: Mapping[int, LayerShape]) -> float:
    """A weight takes 2 operations a token; a token of context, in each layer, 2 * heads * (key_dim + value_dim)."""
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    if getattr(module, "hf_quantizer", None) is not None:  # packed: their elements are not weights
        linear = (part for part in module.modules() if hasattr(part, "in_features") and hasattr(part, "out_features"))
        weights = sum(part.in_features * part.out_features for part in linear)
    else:
        embedded = module.get_input_embeddings().weight.numel()
        weights = sum(weight.numel() for weight in module.parameters()) - embedded
    attended = sum(heads * (shape.key_dim + shape.value_dim) for shape in shapes.values())
    return float(weights / attended) if attended and weights > 0 else math.inf


def _stop_ids(module: Any, config: Any) -> frozenset[int]:
    generation = getattr(module, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())
