"""The synchronous engine, owned by one thread: requests in, outputs out, one forward a step.

    submit --> waiting --plan--> running --forward--> choose --> text --> CoreOutput
                  ^                 |
                  '---- preempt ----'

Knows no HTTP, no queue and no other thread; the clock is passed in. A request that fails takes nobody with it.
"""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import psutil
import torch
from torch import Tensor

from engines.blocks import ids_from_bytes, num_blocks
from engines.contract import (
    EMPTY_DIGEST,
    ContextOverflow,
    EngineError,
    EngineOverloaded,
    FinishReason,
    RequestRefused,
    TokenLogprob,
    Usage,
    chain_digest,
)
from engines.local.config import EngineConfig
from engines.local.kv.cache import KVCache
from engines.local.kv.eviction import Lru
from engines.local.kv.session_cache import SessionCache, SessionPath, grown_marks, session_tag
from engines.local.kv.storage import KVStorage
from engines.local.model import LoadedModel
from engines.local.output import TextStream
from engines.local.runner import Runner
from engines.local.sampler import Choice, Failed, MaskFactory, TokenChooser, choose, refuse_sampling
from engines.local.scheduler import Row, Scheduler
from engines.local.sequence import CoreRequest, Sequence

__all__ = ["CoreOutput", "CoreRequest", "EngineStats", "LocalEngine", "SessionInfo", "Started"]


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in and nothing is generated yet."""

    prompt_tokens: int
    cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """What a step added to one request. The last one carries `finish` and `usage`, or `error`."""

    request_id: str
    started: Started | None = None
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | None = None
    usage: Usage | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SessionInfo:
    session: str
    salt: str
    tokens: int
    blocks: int  # that still hold what the session wrote
    last_used_s: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int
    waiting: int
    sessions: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    steps: int
    prefill_tokens: int  # run through the model as prompt (recomputation after a preemption included)
    decode_tokens: int
    cached_tokens: int  # prompt tokens reused instead of run
    preemptions: int
    evictions: int


@dataclass(slots=True, eq=False)
class Live:
    """A request between submit and its last output."""

    seq: Sequence
    chooser: TokenChooser
    text: TextStream
    stop_ids: frozenset[int]
    keep: bool = True  # its path becomes the session's when it ends


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prefill: int = 0
    decode: int = 0
    cached: int = 0


@dataclass(slots=True)
class LocalEngine:
    """`mask_factory` None: requests with a grammar are refused."""

    model: LoadedModel
    config: EngineConfig
    clock: Callable[[], float]
    mask_factory: MaskFactory | None = None
    window: int = field(init=False)  # tokens: the model's, and no more than the pool holds
    _cache: KVCache = field(init=False)
    _scheduler: Scheduler = field(init=False)
    _runner: Runner = field(init=False)
    _sessions: SessionCache = field(init=False)
    _live: dict[str, Live] = field(init=False, default_factory=dict)
    _ended: list[CoreOutput] = field(init=False, default_factory=list)  # between steps, given out by the next
    _counters: Counters = field(init=False, default_factory=Counters)
    _arrivals: count[int] = field(init=False, default_factory=count)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        config, model = self.config, self.model
        pages = pool_pages(config, model)
        storage = KVStorage(
            model.shapes,
            pages,
            config.block_size,
            dtype=model.dtype,
            device=model.device,
            nan_fill=config.debug_nan_fill,
        )
        self._cache = KVCache(
            pages,
            config.block_size,
            storage,
            model=model.name,
            policy=Lru(),
            prefix_reuse=config.prefix_reuse,
        )
        self._scheduler = Scheduler(self._cache, config)
        self._runner = Runner(model, storage)
        self._sessions = SessionCache(config.max_sessions, config.max_session_tokens)
        self.window = min(config.window or model.window, model.window, pages * config.block_size)
        self._rng = random.Random(config.seed if config.seed is not None else os.urandom(16))

    # ------------------------------------------------------------------ in
    def submit(self, request: CoreRequest) -> None:
        """Queue a request. Raises UnknownBase, ContextOverflow, RequestRefused, EngineOverloaded; then nothing is kept.

        The cost of a base is one copy of its ids; nothing of it is hashed or looked up again.
        """
        if request.request_id in self._live:
            raise RequestRefused(f"request {request.request_id!r} is running already", param="request_id")
        waiting = self._scheduler.num_waiting(background=request.priority > 0)
        if waiting >= self.config.max_waiting:
            raise EngineOverloaded(f"{waiting} requests are waiting", retry_after_s=1.0)
        refuse_sampling(
            request.sampling,
            vocab_size=self.model.vocab_size,
            max_logprobs=self.config.max_logprobs,
            grammars=self.mask_factory is not None,
        )
        seq = self._sequence(request)
        grammar = request.sampling.grammar
        mask = self.mask_factory(grammar) if grammar is not None and self.mask_factory is not None else None
        seed = request.sampling.seed
        rng = random.Random(seed if seed is not None else self._rng.getrandbits(64))
        chooser = TokenChooser(request.sampling, rng, seq.tokens[:] if _needs_prompt(request) else array("I"), mask)
        text = TextStream(self.model.decode, stops=request.sampling.stop, prompt_tail=seq.tokens[-8:].tolist())
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids |= self.model.stop_ids
        self._live[seq.request_id] = Live(seq, chooser, text, stop_ids, keep=not seq.background)
        self._scheduler.add(seq)

    def _sequence(self, request: CoreRequest) -> Sequence:
        try:
            delta = ids_from_bytes(request.delta)
        except ValueError as error:
            raise RequestRefused("the delta is no list of 4-byte token ids", param="delta") from error
        base = request.base if request.base is not None and request.base.length else None
        path = self._path(request)
        tokens = path.ids[: base.length] + delta if path is not None and base is not None else delta
        self._refuse_ids(delta, len(tokens), request.sampling.max_tokens)
        seq = Sequence(
            request_id=request.request_id,
            tokens=tokens,
            prompt_len=len(tokens),
            sampling=request.sampling,
            salt=request.salt,
            priority=request.priority,
            arrival=next(self._arrivals),
            submitted_s=self.clock(),
            session=request.session,
        )
        if request.session is not None:
            seq.tag = session_tag(request.session, request.salt)
            before = base.digest if base is not None else EMPTY_DIGEST
            digest = chain_digest(before, request.delta) if len(delta) else before
            seq.marks = grown_marks(path, base, len(tokens), digest)
        if path is not None:
            seq.hint = path.blocks
            seq.hint_len = common_prefix(path.ids, tokens, base.length if base is not None else 0)
        return seq

    def _path(self, request: CoreRequest) -> SessionPath | None:
        base = request.base
        if request.session is None:
            if base is not None and base.length:
                raise RequestRefused("a base needs the session it belongs to", param="base")
            return None
        if base is not None and base.length:
            return self._sessions.find(request.session, request.salt, base)
        return self._sessions.get(request.session, request.salt)

    def _refuse_ids(self, delta: array[int], prompt_len: int, max_tokens: int) -> None:
        if not prompt_len:
            raise RequestRefused("the prompt is empty", param="prompt")
        if prompt_len + max_tokens > self.window:
            raise ContextOverflow(
                f"{prompt_len} prompt tokens and max_tokens {max_tokens} exceed the window of {self.window}",
                limit=self.window,
                requested=prompt_len + max_tokens,
            )
        if len(delta) and (largest := max(delta)) >= self.model.vocab_size:
            raise RequestRefused(
                f"token id {largest} is not in the vocabulary of {self.model.vocab_size}", param="prompt"
            )

    def abort(self, request_id: str) -> None:
        """End a request now; its pages are free or cached when this returns. Unknown ids are nothing."""
        live = self._live.get(request_id)
        if live is not None:
            self._ended.append(self._end(live, "cancelled"))

    # ------------------------------------------------------------------ step
    def has_work(self) -> bool:
        return bool(self._live or self._ended)

    def step(self) -> list[CoreOutput]:
        """Schedule, run, choose; what became of each request."""
        outputs, self._ended = self._ended, []
        plan = self._scheduler.plan()
        now = self.clock()
        for seq in plan.admitted:
            cached = seq.cached_tokens or 0
            self._counters.cached += cached
            outputs.append(CoreOutput(seq.request_id, Started(seq.prompt_len, cached, now - seq.submitted_s)))
        if plan.rows:
            self._counters.steps += 1
            for rows, logits in self._run(plan.rows, outputs):
                outputs += self._after(rows, logits)
        return outputs

    def _run(self, rows: tuple[Row, ...], outputs: list[CoreOutput]) -> list[tuple[tuple[Row, ...], Tensor]]:
        """One forward over all rows; where that fails, one for each, so that only the guilty end in an error."""
        try:
            return [(rows, self._runner.run(rows))]
        except (RuntimeError, ValueError, IndexError) as error:
            if len(rows) == 1:
                outputs.append(self._fail(self._live[rows[0].seq.request_id], f"the forward failed: {error}"))
                return []
            return [done for row in rows for done in self._run((row,), outputs)]

    def _after(self, rows: tuple[Row, ...], logits: Tensor) -> list[CoreOutput]:
        sampling = [row for row in rows if row.samples]
        lives = [self._live[row.seq.request_id] for row in sampling]
        choices = choose(logits[: len(lives)], [live.chooser for live in lives])
        failed = {id(live.seq) for live, choice in zip(lives, choices, strict=True) if isinstance(choice, Failed)}
        for row in rows:
            if row.seq.num_output and row.count == 1:
                self._counters.decode += 1
            else:
                self._counters.prefill += row.count
            if id(row.seq) not in failed:
                self._cache.advance(row.seq, row.count)
        return [self._take(live, choice) for live, choice in zip(lives, choices, strict=True)]

    def _take(self, live: Live, choice: Choice | Failed) -> CoreOutput:
        """One more token of a request."""
        if isinstance(choice, Failed):
            return self._fail(live, choice.reason)
        seq, sampling = live.seq, live.seq.sampling
        try:
            live.chooser.accept(choice.id)
        except EngineError as error:
            return self._fail(live, str(error))
        seq.tokens.append(choice.id)
        mask = live.chooser.mask
        logprobs = self._logprobs(choice)
        if choice.id in live.stop_ids:
            return self._end(live, "stop", ids=(choice.id,), logprobs=logprobs)
        piece = live.text.push(choice.id)
        if piece.stop is not None:
            return self._end(live, "stop", ids=(choice.id,), text=piece.text, stop=piece.stop, logprobs=logprobs)
        if mask is not None and mask.finished:
            return self._end(live, "stop", ids=(choice.id,), text=piece.text, logprobs=logprobs)
        if seq.num_output >= sampling.max_tokens:
            return self._end(live, "length", ids=(choice.id,), text=piece.text, logprobs=logprobs)
        return CoreOutput(seq.request_id, ids=(choice.id,), text=piece.text, logprobs=logprobs)

    def _logprobs(self, choice: Choice) -> tuple[TokenLogprob, ...]:
        if choice.logprob is None:
            return ()
        spell = self.model.spell
        top = tuple((token, spell(token), logprob) for token, logprob in choice.top)
        return (TokenLogprob(choice.id, spell(choice.id), choice.logprob, top),)

    # ------------------------------------------------------------------ end
    def _end(
        self,
        live: Live,
        finish: FinishReason,
        *,
        ids: tuple[int, ...] = (),
        text: str = "",
        stop: str | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> CoreOutput:
        seq = live.seq
        if stop is None:
            rest = live.text.flush()
            text, stop = text + rest.text, rest.stop
            finish = "stop" if stop is not None else finish
        usage = Usage(seq.prompt_len, seq.num_output, seq.cached_tokens or 0)
        self._scheduler.remove(seq)
        self._leave(live)
        del self._live[seq.request_id]
        return CoreOutput(seq.request_id, None, ids, text, logprobs, finish, stop, usage)

    def _leave(self, live: Live) -> None:
        """Give the pages back; a session that has run keeps its path, as ordinary cache."""
        seq = live.seq
        ran = seq.cached_tokens is not None
        if seq.session is None or not live.keep or not ran:
            if seq.preempted and seq.hint is not None:
                self._cache.drop(seq.hint)
            self._cache.release(seq)
            return
        preempted = seq.hint if seq.preempted else None
        output = seq.tokens[seq.prompt_len :].tobytes()
        if output:
            seq.marks[len(seq.tokens)] = chain_digest(seq.marks[seq.prompt_len], output)
        if preempted is not None:
            self._cache.release(seq)
        blocks = preempted if preempted is not None else self._cache.keep(seq)
        path = SessionPath(seq.session, seq.salt, seq.tokens, seq.marks, blocks, self.clock())
        for gone in self._sessions.put(path):
            self._cache.drop(gone.blocks)

    def _fail(self, live: Live, reason: str) -> CoreOutput:
        seq = live.seq
        self._scheduler.remove(seq)
        self._cache.release(seq, scrub=True)
        del self._live[seq.request_id]
        usage = Usage(seq.prompt_len, seq.num_output, seq.cached_tokens or 0)
        return CoreOutput(seq.request_id, usage=usage, error=reason)

    # ------------------------------------------------------------------ sessions, figures, invariants
    def forget(self, session: str, salt: str) -> int:
        """Drop a session: its running requests are cancelled, its path goes, and pages that no other session used are
        zeroed and leave the index -> blocks freed."""
        tag = session_tag(session, salt)
        for live in [live for live in self._live.values() if live.seq.tag == tag]:
            live.keep = False
            self.abort(live.seq.request_id)
        path = self._sessions.pop(session, salt)
        freed = self._cache.forget(tag)
        if path is not None:
            self._cache.drop(path.blocks)
        return freed

    def sessions(self) -> list[SessionInfo]:
        """What is kept, the least recently used first."""
        pool = self._cache.pool
        return [
            SessionInfo(
                path.session,
                path.salt,
                len(path.ids),
                int((pool.owner[path.blocks.pages] == path.blocks.uids).sum())
                + bool(path.blocks.tail_len and pool.owner[path.blocks.tail_page] == path.blocks.tail_uid),
                path.last_used_s,
            )
            for path in self._sessions
        ]

    def stats(self) -> EngineStats:
        pool, counters = self._cache.pool, self._counters
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            sessions=len(self._sessions),
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=pool.cached,
            blocks_used=pool.used,
            steps=counters.steps,
            prefill_tokens=counters.prefill,
            decode_tokens=counters.decode,
            cached_tokens=counters.cached,
            preemptions=self._scheduler.preemptions,
            evictions=pool.evictions,
        )

    def check(self) -> None:
        """Every invariant; AssertionError tells of a mistake of ours."""
        running, waiting = self._scheduler.running, self._scheduler.waiting
        assert {id(live.seq) for live in self._live.values()} == {id(seq) for seq in (*running, *waiting)}
        assert running == sorted(running, key=lambda seq: seq.order), "running out of order"
        assert waiting == sorted(waiting, key=lambda seq: seq.order), "waiting out of order"
        assert not any(len(seq.table) for seq in waiting), "a waiting sequence holds pages"
        for seq in running:
            assert seq.written <= len(seq.table) * self.config.block_size, "written past the table"
            assert len(seq.uids) == seq.written // self.config.block_size, "a full block is not published"
        self._cache.check(running)


def pool_pages(config: EngineConfig, model: LoadedModel) -> int:
    """Pages that the configured bytes hold, for all layers together. ValueError when there is room for none."""
    page_bytes = model.kv_bytes_per_token * config.block_size
    wanted = config.pool_bytes
    if wanted is None:
        on_gpu = model.device.type == "cuda"
        free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available
        wanted = int(free * config.pool_share)
        if not on_gpu:
            wanted = min(wanted, config.pool_bytes_cap)
    pages = wanted // page_bytes - 1  # the guard page
    if pages < 1:
        raise ValueError(f"pool_bytes is {wanted}: a page of {config.block_size} tokens takes {page_bytes} bytes")
    most = config.max_running + config.max_sessions  # windows that could ever be held
    return min(pages, most * num_blocks(model.window, config.block_size))


def common_prefix(one: array[int], other: array[int], known: int) -> int:
    """How many ids both begin with, `known` of them for sure."""
    least = min(len(one), len(other))
    same = np.frombuffer(one, np.uint32, least)[known:] == np.frombuffer(other, np.uint32, least)[known:]
    return least if bool(same.all()) else known + int(same.argmin())


def _needs_prompt(request: CoreRequest) -> bool:
    return request.sampling.repetition_penalty != 1
