"""A whole engine in milliseconds: a model of one layer on the real paged attention, and a plain twin to compare with.

`TinyModel` is one layer: values are token embeddings, keys carry position and token, so the next token depends on each
earlier token and its place. Whatever the engine does to pages, `TinyModel.greedy` knows the right answer.
"""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from engines.contract import Base, Sampling
from engines.local.attention import IMPLEMENTATION, paged_attention
from engines.local.config import EngineConfig
from engines.local.engine import CoreOutput, CoreRequest, LocalEngine
from engines.local.kv.shapes import LayerShape
from engines.local.model import LoadedModel

VOCAB, DIM = 64, 16


class TinyModel(nn.Module):
    """The call signature that the engine uses, two attention layers, no training."""

    layer_idx = 0

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(VOCAB, DIM, generator=draw)
        self.place = torch.randn(4096, DIM, generator=draw)
        self.out = torch.randn(DIM, VOCAB, generator=draw)
        self.poison: int | None = None  # a token id that makes logits NaN
        self.break_on: int | None = None  # a token id that makes the forward raise

    def parts(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value [tokens, DIM]."""
        value = self.embedding[ids]
        place = self.place[positions]
        return value + place, value - place, value + 0.5 * place

    def forward(
        self, *, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, kv: object, **_: object
    ) -> SimpleNamespace:
        if self.break_on is not None and bool((input_ids == self.break_on).any()):
            raise RuntimeError("this token breaks the model")
        q, k, v = (part[None, None] for part in self.parts(input_ids[0], position_ids[0]))
        if self.poison is not None:
            v = torch.where((input_ids == self.poison)[:, None, :, None], torch.nan, v)
        out, _none = paged_attention(self, q, k, v, None, kv=kv)
        hidden = out[0, :, 0] + v[0, 0]
        return SimpleNamespace(logits=(hidden[logits_to_keep] @ self.out)[None])

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What any right engine generates."""
        ids = list(prompt)
        for _ in range(count):
            q, k, v = self.parts(torch.tensor(ids), torch.arange(len(ids)))
            weights = torch.softmax(q[-1] @ k.T * DIM**-0.5, -1)
            ids.append(int(((weights @ v + v[-1]) @ self.out).argmax()))
        return ids[len(prompt) :]


def tiny_loaded(module: TinyModel | None = None, window: int = 2048) -> LoadedModel:
    return LoadedModel(
        name="tiny",
        module=module or TinyModel(),
        tokenizer=None,
        decode=lambda ids: "".join(chr(ord("0") + i) for i in ids),
        window=window,
        vocab_size=VOCAB,
        stop_ids=frozenset(),
        shapes={0: LayerShape(1, DIM, DIM)},
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def tiny_engine(
    pages: int = 64, *, module: TinyModel | None = None, window: int = 2048, **settings: object
) -> LocalEngine:
    """An engine over `pages` pages of 8 tokens; freed pages are filled with NaN."""
    model = tiny_loaded(module, window)
    values: dict[str, object] = {"block_size": 8, "debug_nan_fill": True, "seed": 1} | settings
    size = int(str(values["block_size"]))
    values["pool_bytes"] = (pages + 1) * size * model.kv_bytes_per_token
    return LocalEngine(model, EngineConfig(**values), time.monotonic)  # type: ignore[arg-type]


def request(
    request_id: str,
    ids: list[int],
    max_tokens: int = 8,
    *,
    base: Base | None = None,
    session: str | None = None,
    salt: str = "",
    priority: int = 0,
    **sampling: object,
) -> CoreRequest:
    wanted = Sampling(**({"max_tokens": max_tokens, "temperature": 0.0} | sampling))  # type: ignore[arg-type]
    return CoreRequest(request_id, array("I", ids).tobytes(), base, session, salt, priority, wanted)


class Answers:
    """Runs an engine to the end, checking every invariant at every step, and collects what came out."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.ids: dict[str, list[int]] = {}
        self.text: dict[str, str] = {}
        self.last: dict[str, CoreOutput] = {}
        self.cached: dict[str, int] = {}
        self.outputs: list[CoreOutput] = []

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs.append(output)
            self.ids.setdefault(output.request_id, []).extend(output.ids)
            self.text[output.request_id] = self.text.get(output.request_id, "") + output.text
            if output.started is not None:
                self.cached[output.request_id] = output.started.cached_tokens
            if output.finish is not None or output.error is not None:
                assert output.request_id not in self.last, "ended twice"
                self.last[output.request_id] = output
        self.engine.check()

    def run(self, *requests: CoreRequest) -> Answers:
        for one in requests:
            self.engine.submit(one)
        while self.engine.has_work():
            self.step()
        assert self.engine.stats().blocks_used == 0
        return self


__all__ = ["IMPLEMENTATION", "Answers", "TinyModel", "request", "tiny_engine", "tiny_loaded"]
