"""A deterministic stand-in for the engine core, run as the model process (`python -m tests.engines.standin_core`).

It answers token n with `(first id of the prompt + n) % VOCAB`, one token a step, and keeps session paths with marks.
Ids that steer it, as the prompt's first: DIE ends the process in the first step, BREAK makes the loop raise, FAIL gives
the request an error in its first step, PRIORITY is answered with the priority.
`options["step_s"]` is the length of a step.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.contract import (
    EMPTY_DIGEST,
    Base,
    ContextOverflow,
    Generated,
    RequestRefused,
    Sampling,
    Shift,
    TokenLogprob,
    UnknownBase,
    Usage,
    chain_digest,
)
from engines.local.backend import Status
from engines.local.checks import u32, u32_bytes
from engines.local.kv.forgotten import Forgotten
from engines.local.process import Loaded, run

VOCAB, WINDOW = 1000, 4096
SCORE_BYTES = 8 << 20  # more than the front keeps of an answer that nobody reads
DIE, BREAK, FAIL, PRIORITY = 901, 902, 903, 904


@dataclass
class Request:
    request_id: str
    delta: bytes
    base: Base | None
    session: str | None
    salt: str
    priority: int
    sampling: Sampling
    shift: Shift | None = None
    generated: Generated | None = None
    pinned: bool = False
    min_bits: int = 0
    system_tokens: int = 0
    recent_from: int = 0
    score_from: int | None = None
    prompt: bytes = b""
    cached: int = 0
    made: list[int] = field(default_factory=list)
    told: bool = False  # that it started


@dataclass
class Started:
    prompt_tokens: int
    cached_tokens: int
    queue_s: float


@dataclass
class Output:
    request_id: str
    started: Started | None = None
    ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()
    finish: str | None = None
    stop: str | None = None
    usage: Usage | None = None
    error: str | None = None
    scores: bytes = b""


@dataclass
class Kept:
    session: str
    salt: str
    ids: bytes
    marks: dict[int, bytes]
    last_used_s: float

    @property
    def bytes(self) -> int:
        return self.blocks * 1000

    @property
    def tokens(self) -> int:
        return len(self.ids) // 4

    @property
    def blocks(self) -> int:
        return self.tokens // 16


class StandinCore:
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, Request] = {}
        self._kept: dict[tuple[str, str], Kept] = {}

    def submit(self, request: Request) -> None:
        if request.sampling.grammar is not None and request.sampling.grammar.kind == "lark":
            raise RequestRefused("no lark here", param="grammar")
        path = self._kept.get((request.session or "", request.salt))
        before = b""
        if request.base is not None:
            if path is None or path.marks.get(request.base.length) != request.base.digest:
                raise UnknownBase("no such mark", length=request.base.length)
            before = path.ids[: request.base.length * 4]
        request.prompt, request.cached = before + request.delta, len(before) // 4
        if request.generated is not None:
            end = len(request.prompt) - 4 * request.generated.ids
            request.made, request.prompt = list(u32(request.prompt[end:])), request.prompt[:end]
            request.delta = request.delta[: len(request.delta) - 4 * request.generated.ids]
        wanted = len(request.prompt) // 4 + request.sampling.max_tokens
        if wanted > WINDOW:
            raise ContextOverflow(f"{wanted} tokens, {WINDOW} fit", limit=WINDOW, requested=wanted)
        self._running[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> list[Output]:
        time.sleep(self._step_s)
        return [self._advance(request) for request in list(self._running.values())]

    def _advance(self, request: Request) -> Output:
        output = Output(request.request_id)
        first = u32(request.prompt)[0]
        if first == DIE:
            os._exit(9)
        assert first != BREAK, "told to break"
        if not request.told:
            request.told = True
            output.started = Started(len(request.prompt) // 4, request.cached, 0.0)
        if first == FAIL:
            del self._running[request.request_id]
            output.error = "told to fail"
            return output
        token = request.priority if first == PRIORITY else (first + len(request.made)) % VOCAB
        request.made.append(token)
        output.ids, output.text = [token], f" {token}"
        if request.sampling.logprobs is not None:
            output.logprobs = [TokenLogprob(token, output.text, -0.25, ((token, output.text, -0.25),))]
        if len(request.made) >= request.sampling.max_tokens:
            output.finish = "length"
            if request.score_from is not None:
                bounds = (request.score_from, request.min_bits, request.system_tokens, request.recent_from)
                output.scores = struct.pack("<4f", *bounds) + bytes(SCORE_BYTES)
            output.usage = Usage(len(request.prompt) // 4, len(request.made), request.cached)
            self._keep(request)
            del self._running[request.request_id]
        return output

    def _keep(self, request: Request) -> None:
        if request.session is None:
            return
        old = self._kept.get((request.session, request.salt))
        digest = request.base.digest if request.base else EMPTY_DIGEST
        start = request.base.length if request.base else 0
        marks = {at: mark for at, mark in (old.marks if old else {}).items() if at <= start} if start else {}
        made = u32_bytes(request.made)
        for at, ids in ((len(request.prompt) // 4, request.delta), (len(request.prompt + made) // 4, made)):
            digest = marks[at] = chain_digest(digest, ids)
        self._kept[request.session, request.salt] = Kept(
            request.session, request.salt, request.prompt + made, marks, time.monotonic()
        )

    def forget(self, session: str, salt: str) -> Forgotten:
        gone = self._kept.pop((session, salt), None)
        return Forgotten(device=gone.blocks if gone else 0)

    def sessions(self) -> list[Kept]:
        return list(self._kept.values())

    def stats(self) -> None: ...

    def check(self) -> None: ...


def load(folder: Path, options: dict[str, Any]) -> Loaded:
    if options.get("fail"):
        raise SystemExit("told not to load")
    time.sleep(options.get("load_s", 0.0))
    return Loaded(
        StandinCore(options.get("step_s", 0.0)),
        Request,
        lambda core, pool_ok: Status(blocks_total=10, blocks_free=10, pool_ok=pool_ok),
        window=WINDOW,
        vocab=VOCAB,
        block_size=16,
        device="cpu",
        dtype="float32",
    )


if __name__ == "__main__":
    run(load)
