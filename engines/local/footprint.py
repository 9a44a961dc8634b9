"""What a model takes in memory, from its config alone: built without weights (on the meta device) and measured.

Parameters are counted module by module, so embeddings, experts and tied heads are what the model's own code makes of
them; K/V shapes come from the same one-token probe that a loaded model goes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engines.local.attention import IMPLEMENTATION, register
from engines.local.config import EngineConfig
from engines.local.fit import RUNTIME_BYTES, Footprint, activation_bytes
from engines.local.kv.quant import UNIT, codecs
from engines.local.kv.shapes import LayerShape, bytes_per_token
from engines.local.model import ModelRefused, probe, refuse_config
from engines.local.weight_bits import LinearFormat, UnknownQuantization, linear_format


def read_footprint(source: str | Path, *, on_cpu: bool = False, engine: EngineConfig | None = None) -> Footprint:
    """Of a folder with a config.json; no weights are read. On a CPU what is not quantized is float32.

    Raises ModelRefused where the engine serves no such model, OSError where there is no config.
    """
    engine = engine or EngineConfig()
    name = Path(source).resolve().name
    config = AutoConfig.from_pretrained(source)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
        del config.quantization_config
    dtype = torch.float32 if on_cpu else config.get_text_config().dtype or torch.bfloat16
    module = _without_weights(name, config, dtype)
    text = config.get_text_config()
    shapes, notes = _shapes(name, module, text)
    try:
        format = linear_format(quantization) if quantization is not None else None
    except UnknownQuantization as error:
        format, notes = None, (*notes, f"{error}; counted as {dtype}")
    words = str(dtype).removeprefix("torch.")
    if format is not None:
        words = f"{words}, stored as {format.words}" if format.decoded else format.words
    parameters, nbytes = _weights(module, None if format is None or format.decoded else format)
    return Footprint(
        name=name,
        parameters=parameters,
        weights=words,
        weight_bytes=nbytes,
        kv_bytes=kv_bytes(shapes, dtype),
        window=int(engine.window or text.max_position_embeddings),
        activation_bytes=step_bytes(module, shapes, engine, dtype),
        runtime_bytes=0 if on_cpu else RUNTIME_BYTES,
        notes=notes,
    )


def step_bytes(module: Any, shapes: Mapping[int, LayerShape], engine: EngineConfig, dtype: torch.dtype) -> int:
    """What a step takes beside weights and pool (fit.activation_bytes)."""
    text = module.config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or 0)
    return activation_bytes(
        batch_tokens=engine.max_batch_tokens,
        sampled_rows=engine.max_running,
        hidden=int(text.hidden_size),
        widest=_widest(module),
        attended=heads * max(shape.value_dim for shape in shapes.values()),
        vocab=int(text.vocab_size),
        itemsize=dtype.itemsize,
    )


def kv_bytes(shapes: Mapping[int, LayerShape], dtype: torch.dtype) -> dict[str, float]:
    """Of one token over all layers: `full` in `dtype`, the codecs' names with their metadata counted."""
    sealed = {
        name: sum(
            codecs(shape.value_dim)[name].nbytes(shape.kv_heads, shape.key_dim, shape.value_dim)
            for shape in shapes.values()
        )
        for name in ("int8", "k8v4", "int4")
    }
    return {"full": bytes_per_token(shapes, dtype)} | {name: nbytes / UNIT for name, nbytes in sealed.items()}


def _without_weights(name: str, config: Any, dtype: torch.dtype) -> Any:
    register()
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            module = build(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    except ValueError as error:
        raise ModelRefused(f"{name}: {error}") from error
    module.eval()
    refuse_config(name, module, config.get_text_config())
    return module


def _shapes(name: str, module: Any, text: Any) -> tuple[dict[int, LayerShape], tuple[str, ...]]:
    """As the probe sees them; where a forward needs weights (experts that are chosen), as the config says."""
    try:
        return dict(probe(module, name, text.num_hidden_layers).shapes), ()
    except (NotImplementedError, RuntimeError) as error:
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        why = str(error).splitlines()[0][:80]
        shape = LayerShape(heads, dim, dim)
        return dict.fromkeys(range(text.num_hidden_layers), shape), (f"K/V by the config, not probed ({why})",)


def _weights(module: nn.Module, format: LinearFormat | None) -> tuple[int, int]:
    """Parameters, and the bytes they take; what is shared (a tied head) counts once."""
    count = nbytes = 0
    seen: set[int] = set()
    for owner, name, parameter in _parameters(module):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        count += parameter.numel()
        linear = isinstance(owner, nn.Linear) and name.endswith(".weight")
        if format is not None and (linear or _experts(name, parameter)) and format.takes(name.rpartition(".")[0]):
            rows, columns = parameter.shape[-2:]
            nbytes += parameter.numel() // (rows * columns) * format.nbytes(rows, columns)
        else:
            nbytes += parameter.nbytes
    nbytes += sum(buffer.nbytes for buffer in module.buffers())
    return count, nbytes


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            yield owner, f"{path}.{name}" if path else name, parameter


def _experts(name: str, parameter: nn.Parameter) -> bool:
    """Weights of all experts of a layer, as one parameter [experts, rows, columns]."""
    return ".experts." in name and parameter.dim() == 3


def _widest(module: nn.Module) -> int:
    """Outputs of the widest linear layer but for the head."""
    head = module.get_output_embeddings()  # type: ignore[operator]  # every causal LM of transformers has it
    widths = [part.out_features for part in module.modules() if isinstance(part, nn.Linear) and part is not head]
    return max(widths, default=0)
