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

from torch import Tensor

from engines.contract import (
    EngineError,
    EngineOverloaded,
    FinishReason,
    RequestRefused,
    TokenLogprob,
    Usage,
    chain_digest,
)
from engines.local.config import EngineConfig
from engines.local.intake import Intake
from engines.local.kv.cache import KVCache
from engines.local.kv.eviction import Lru
from engines.local.kv.session_cache import SessionCache, SessionPath, session_tag
from engines.local.kv.storage import KVStorage
from engines.local.model import LoadedModel
from engines.local.output import TextStream
from engines.local.report import CoreOutput, EngineStats, SessionInfo, Started
from engines.local.runner import Runner
from engines.local.sampler import Choice, Failed, MaskFactory, TokenChooser, choose, refuse_sampling
from engines.local.scheduler import Row, Scheduler
from engines.local.sequence import CoreRequest, Sequence
from engines.local.sizing import pool_pages

__all__ = ["CoreOutput", "CoreRequest", "EngineStats", "LocalEngine", "SessionInfo", "Started"]


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
    shifted: int = 0


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
    _intake: Intake = field(init=False)
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
            rotations=model.rotations,
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
        self._intake = Intake(self._sessions, self.window, model.vocab_size, shifts=model.no_shift is None)
        self._rng = random.Random(config.seed if config.seed is not None else os.urandom(16))

    # ------------------------------------------------------------------ in
    def submit(self, request: CoreRequest) -> None:
        """Queue a request. Raises UnknownBase, ContextOverflow, RequestRefused, EngineOverloaded; then nothing is
        kept."""
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
        seq = self._intake.sequence(request, arrival=next(self._arrivals), now_s=self.clock())
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
            self._counters.shifted += seq.shifted_tokens
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
        self._scheduler.remove(seq)
        self._leave(live)
        del self._live[seq.request_id]
        return CoreOutput(seq.request_id, None, ids, text, logprobs, finish, stop, _usage(seq))

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
        return CoreOutput(seq.request_id, usage=_usage(seq), error=reason)

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
            shifted_tokens=counters.shifted,
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
            assert len(seq.uids) == seq.exact // self.config.block_size, "not just the full, exact blocks are published"
        self._cache.check(running)


def _usage(seq: Sequence) -> Usage:
    return Usage(seq.prompt_len, seq.num_output, seq.cached_tokens or 0, seq.shifted_tokens)


def _needs_prompt(request: CoreRequest) -> bool:
    return request.sampling.repetition_penalty != 1
