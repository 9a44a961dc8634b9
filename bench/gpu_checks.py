"""The checks of bench.gpu. Each gives its findings. `device`: a GPU, or the CPU under Triton's interpreter (small)."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_pages import by_kernels, by_reference, make_pages
from engines.contract import Sampling
from engines.local.config import EngineConfig
from engines.local.engine import CoreRequest, LocalEngine
from engines.local.kernels.seal import encode_into
from engines.local.kv.quant import METADATA, UNIT, AffinePlane, Encoded, codecs
from engines.local.kv.shapes import LayerShape
from engines.local.model import LoadedModel, adopt, load_model
from engines.local.partial import Scores

# float32: sums in another order. Halves: weights, values and results have 11 or 8 bits; values are about 1.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    detail: str

    def told(self) -> dict[str, Any]:
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


def kernels(device: torch.device, model: Path | None) -> list[Check]:
    """Decode rows and chunks over pages of every precision, against partial.attend_parts."""
    small = device.type == "cpu"
    single, brain, half = torch.float32, torch.bfloat16, torch.float16
    # each compiles eight kernels of its own: together they show every type, size of pages and shape of head once
    cases = [
        (4, LayerShape(2, 64, 64), single, 64, False),
        (32, LayerShape(8, 128, 128), brain, 32, False),
        (9, LayerShape(3, 64, 64), brain, 16, True),
        (4, LayerShape(1, 96, 96), half, 64, False),
        (8, LayerShape(4, 256, 256), brain, 32, True),
        (32, LayerShape(8, 128, 128), single, 32, True),
    ]
    return [_kernel_case(device, *case, small=small) for case in cases[: 1 if small else None]]


def _kernel_case(
    device: torch.device,
    heads: int,
    shape: LayerShape,
    dtype: torch.dtype,
    size: int,
    all_at_once: bool,
    *,
    small: bool,
) -> Check:
    """`all_at_once`: with a window, softcap and sinks."""
    each = UNIT // size
    pages = make_pages({0: shape}, pages=14 * each, size=size, dtype=dtype, device=device)
    mixed, torn = pages.mixed(1), pages.mixed(1 + 6 * each, torn=True)
    full = np.arange(14 * each, 12 * each, -1, dtype=np.int64)
    rows = [(mixed, 1, 380), (torn, 6, 350)] if small else [(mixed, 1, 380), (full, 1, 33), (torn, 70, 350)]
    draw = torch.Generator().manual_seed(5)
    query = torch.randn(heads, sum(row[1] for row in rows), shape.key_dim, generator=draw).to(device, dtype)
    sinks = torch.randn(heads, generator=draw).to(device, dtype)
    scale = shape.key_dim**-0.5
    scores = Scores(scale, 70, 5.0, sinks) if all_at_once else Scores(scale, None, None, None)
    got, wanted = (attend(pages, 0, rows, query, scores) for attend in (by_kernels, by_reference))
    worst = float((got.float() - wanted.float()).abs().max())
    name = f"attention {heads} heads, {shape.kv_heads} x {shape.key_dim}, {dtype}, pages of {size}".replace(
        "torch.", ""
    )
    return Check(name, worst <= TOLERANCE[dtype], f"largest error {worst:.1e}, at most {TOLERANCE[dtype]:.0e}")


def seal(device: torch.device, model: Path | None) -> list[Check]:
    """Bits of the sealing kernels against the torch codecs on a CPU; turned values against those of the same device,
    whose product they share."""
    found = []
    for dim in (64,) if device.type == "cpu" else (64, 80, 96, 128):
        x = torch.randn(4, UNIT, 2, dim, generator=torch.Generator().manual_seed(dim))
        x[0, :, 0, 1] *= 300.0
        x[1] *= 3e-6
        x[2, :, 1] = 0.25
        planes = dict.fromkeys(plane for codec in codecs(dim).values() for plane in (codec.key, codec.value))
        for plane in planes:
            assert isinstance(plane, AffinePlane)
            layout = plane.layout(2, dim)
            parts = ((layout.codes, torch.uint8), (layout.steps, METADATA), (layout.steps, METADATA))
            into = Encoded(*(torch.zeros(4, *shape, dtype=dtype, device=device) for shape, dtype in parts))
            encode_into(plane, x.to(device), into)
            differing = []
            wanted = plane.encode(x.to(device) if plane.turned else x)
            for name, got, want in zip(Encoded._fields, into, wanted, strict=True):
                differing.append(f"{name} {int((got.cpu() != want.cpu()).sum())}")
            # torch divides by a reciprocal on a GPU: a turned plane may differ in the last place there
            allowed = 0.001 * x.numel() if plane.turned and device.type != "cpu" else 0
            wrong = sum(int(entry.split()[1]) for entry in differing)
            found.append(Check(f"seal {dim} {plane}", wrong <= allowed, "differing: " + ", ".join(differing)))
    return found


# ---------------------------------------------------------------------- end to end
def random_model(device: torch.device, *, large: bool = False) -> LoadedModel:
    """A Llama of random weights, float32 where greedy answers are compared."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128}
    if device.type != "cpu":
        size |= {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
        size |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000}
    if large:
        size |= {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16, "num_attention_heads": 32}
        size |= {"num_key_value_heads": 8, "head_dim": 128}
    config = LlamaConfig(**size, max_position_embeddings=32768, bos_token_id=0, eos_token_id=None)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if large else torch.float32
    with torch.device(device):
        module = LlamaForCausalLM._from_config(config, dtype=dtype)
    return adopt(module, name="random", decode=lambda ids: " ".join(map(str, ids)))


def _model(device: torch.device, folder: Path | None) -> LoadedModel:
    if folder is None:
        return random_model(device)
    return load_model(folder, device=str(device), dtype=torch.float32)


def prompt(vocab: int, length: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab, (length,), generator=draw).tolist()


def core_request(name: str, ids: list[int], max_tokens: int, *, session: str | None = None) -> CoreRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return CoreRequest(name, array("I", ids).tobytes(), None, session, "", 0, sampling)


def answers(engine: LocalEngine, requests: list[CoreRequest]) -> dict[str, list[int]]:
    """Run to the end, checking the engine's books -> generated ids."""
    said: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            said[output.request_id] += output.ids
    engine.check()
    return said


def greedy(device: torch.device, model: Path | None) -> list[Check]:
    """Greedy tokens of the engine on the kernels, first, from cache and from recorded graphs, against transformers'
    generate."""
    loaded = _model(device, model)
    small = device.type == "cpu"
    lengths, count = ((5, 20), 3) if small else ((3, 40, 200, 600, 33), 32)
    prompts = [prompt(loaded.vocab_size, length, length) for length in lengths]
    wanted = [_generate(loaded, ids, count) for ids in prompts]
    found = []
    for graphs in (False, True):
        engine = LocalEngine(loaded, _config(loaded, kernels="triton", cuda_graphs=graphs), time.monotonic)
        for turn in ("first",) if small else ("first", "from cache"):
            requests = [core_request(f"{turn}{i}", ids, count) for i, ids in enumerate(prompts)]
            said = answers(engine, requests)
            equal = sum(said[f"{turn}{i}"] == ids for i, ids in enumerate(wanted))
            how = "graphs, " if graphs else ""
            told = f"{equal} of {len(wanted)} prompts"
            recorded = engine._runner._graphs
            if graphs and recorded is not None and getattr(recorded, "refused", None):
                found.append(Check("graphs are recorded", False, str(recorded.refused)))  # type: ignore[attr-defined]
            found.append(Check(f"greedy equality, {how}{turn}", equal == len(wanted), told))
    return found


def _config(loaded: LoadedModel, *, tokens: int = 8192, **settings: Any) -> EngineConfig:
    pool = tokens * loaded.kv_bytes_per_token
    return EngineConfig(pool_bytes=pool, max_sessions=64, seed=1, block_size=32, **settings)


@torch.inference_mode()
def _generate(loaded: LoadedModel, ids: list[int], count: int) -> list[int]:
    module: Any = loaded.module
    module.set_attn_implementation("eager")
    given = torch.tensor([ids], device=loaded.device)
    out = module.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    adopt(module, name=loaded.name, decode=loaded.decode)
    return [int(i) for i in out[0, len(ids) :]]


def sealed_sessions(device: torch.device, model: Path | None) -> list[Check]:
    """A second turn over sealed units: the kernels against torch on the same device."""
    loaded = _model(device, model)
    length, count = (200, 2) if device.type == "cpu" else (1500, 16)
    found = []
    for policy in ("int4",) if device.type == "cpu" else ("int8", "k8v4", "int4"):
        said = []
        for which in ("torch", "triton"):
            config = _config(loaded, kernels=which, kv_precision=policy, tokens=32768)
            engine = LocalEngine(loaded, config, time.monotonic)
            ids = prompt(loaded.vocab_size, length, 9)
            first = answers(engine, [core_request("a", ids, 1, session="s")])["a"]
            second = [*ids, *first, *prompt(loaded.vocab_size, 9, 10)]
            said.append((answers(engine, [core_request("b", second, count, session="s")])["b"], engine.stats().sealed))
        (torch_ids, _), (kernel_ids, sealed) = said
        same = sum(a == b for a, b in zip(torch_ids, kernel_ids, strict=True))
        ok = same == count and sealed[policy] > 0
        found.append(Check(f"sealed session, {policy}", ok, f"{same} of {count} tokens, {sealed[policy]} units"))
    return found


def tiers(device: torch.device, model: Path | None) -> list[Check]:
    """Sessions that the pool gives up come back from host memory with the same answers; copies on a stream of their own
    are whole while kernels run."""
    loaded = _model(device, model)
    small = device.type == "cpu"
    length, many, count = (64, 3, 2) if small else (600, 8, 8)
    room = length + 32 + count + 64  # tokens: one session, and a page to guard the pool
    roomy = LocalEngine(loaded, _config(loaded, kernels="torch"), time.monotonic)
    tight = LocalEngine(
        loaded,
        _config(loaded, kernels="torch" if small else "triton", tokens=room, host_bytes=256 << 20),
        time.monotonic,
    )
    said = []
    for engine in (roomy, tight):
        of_engine: dict[str, list[int]] = {}
        for turn in range(2):
            for session in range(many):
                ids = prompt(loaded.vocab_size, length + 32 * turn, session)
                of_engine |= answers(engine, [core_request(f"{turn}.{session}", ids, count, session=str(session))])
        said.append(of_engine)
    host_tokens = tight.stats().host_tokens
    ok = said[0] == said[1] and host_tokens > 0
    found = [Check("sessions from host memory", ok, f"{host_tokens} tokens came from it")]
    if not small:
        found.append(_streams(device))
    return found


def _streams(device: torch.device) -> Check:
    """Pages down to pinned memory and up again beside a busy main stream."""
    source = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device=device)
    host = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
    back = torch.zeros_like(source)
    work = torch.randn(4096, 4096, device=device)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(source, non_blocking=True)
        back.copy_(host, non_blocking=True)
    for _ in range(8):
        work = torch.tanh(work @ work)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return Check("copies on a side stream", bool(torch.equal(source, back)), "64 MiB down and up")
