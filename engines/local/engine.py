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
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from engines.contract import (
    EngineOverloaded,
    FinishReason,
    RequestRefused,
    TokenLogprob,
    chain_digest,
)
from engines.kv_events import KvEvent
from engines.kv_log import KvLog
from engines.local.config import EngineConfig
from engines.local.intake import Intake
from engines.local.kernels.path import AttentionPath, choose_attention, decode_graphs, encoder, kernel_path
from engines.local.kv.cache import KVCache
from engines.local.kv.forgotten import Forgotten
from engines.local.kv.policies import make_policy
from engines.local.kv.precision import SEALED, Precision, PrecisionPolicy, policy_named
from engines.local.kv.quant import codecs
from engines.local.kv.sealed import Codecs
from engines.local.kv.sealer import Sealer
from engines.local.kv.session_cache import SessionCache, SessionPath, session_tag
from engines.local.kv.storage import KVStorage
from engines.local.kv.tiers.tiers import Tiers
from engines.local.live import Live, Taken
from engines.local.model import LoadedModel
from engines.local.native.adopt import native_decoder
from engines.local.report import CoreOutput, EngineStats, SessionInfo, Started
from engines.local.runner import Logits, Runner
from engines.local.sampler import Board, MaskFactory, TokenChooser, refuse_sampling
from engines.local.scheduler import Row, Scheduler
from engines.local.sequence import CoreRequest
from engines.local.sizing import pool_pages, pool_units
from engines.local.speculate import lookup
from engines.local.suspension import Suspension
from engines.local.tiering import make_tiers, tier_stats
from engines.output import TextStream

SEALED_A_STEP = 1  # units between two steps: some 10 ms of a model of 30 layers, and a step decodes
SEALED_WHEN_IDLE = 4
IDLE_S = 0.005  # that a step without rows waits for a disk's threads: commands are looked for in between

__all__ = ["CoreOutput", "CoreRequest", "EngineStats", "LocalEngine", "SessionInfo", "Started"]


PIN_SHARE = 0.25  # of the pool, at most, is kept before other cached pages


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prefill: int = 0
    decode: int = 0
    cached: int = 0
    shifted: int = 0
    drafted: int = 0
    accepted: int = 0

    def note(self, row: Row, written: int) -> None:
        """`written` tokens of a row that was run count."""
        if row.seq.num_output and row.count == 1 + len(row.draft):
            self.decode += written
        else:
            self.prefill += written
        self.drafted += len(row.draft)
        self.accepted += max(written - (row.count - len(row.draft)), 0)


@dataclass(slots=True)
class LocalEngine:
    """`mask_factory` None: requests with a grammar are refused."""

    model: LoadedModel
    config: EngineConfig
    clock: Callable[[], float]
    mask_factory: MaskFactory | None = None
    policy: PrecisionPolicy | None = None  # None: that of `config.kv_precision`
    codecs: Codecs = codecs
    usable: Set[Precision] = frozenset(SEALED)  # codecs that the model bears (self_check)
    fingerprint: str = ""  # of the model's files: what is kept in files is good for no other
    suspension: Suspension = field(init=False)
    window: int = field(init=False)  # tokens: the model's, and no more than the pool holds
    no_native: str | None = field(init=False)  # why the compiled decoder does not run; None: it does
    attention: AttentionPath = field(init=False)
    _log: KvLog | None = field(init=False)
    _tiers: Tiers | None = field(init=False)
    _cache: KVCache = field(init=False)
    _scheduler: Scheduler = field(init=False)
    _runner: Runner = field(init=False)
    _sessions: SessionCache = field(init=False)
    _sealer: Sealer = field(init=False)
    _intake: Intake = field(init=False)
    _live: dict[str, Live] = field(init=False, default_factory=dict)
    _ended: list[CoreOutput] = field(init=False, default_factory=list)  # between steps, given out by the next
    _counters: Counters = field(init=False, default_factory=Counters)
    _arrivals: count[int] = field(init=False, default_factory=count)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        config, model = self.config, self.model
        pages = pool_pages(config, model)
        units = pool_units(config, model, pages, self.codecs, self.usable)
        self.attention = choose_attention(config.kernels, model.device, model.dtype, model.shapes)
        storage = KVStorage(
            model.shapes,
            pages,
            config.block_size,
            dtype=model.dtype,
            device=model.device,
            rotations=model.rotations,
            nan_fill=config.debug_nan_fill,
            units=units,
            codecs=self.codecs,
            encode=encoder(self.attention),
        )
        self._log = KvLog(config.block_size) if config.kv_events else None
        policy = make_policy(config.eviction)
        self._tiers = make_tiers(
            config, model, storage, policy, clock=self.clock, log=self._log, fingerprint=self.fingerprint
        )
        self._cache = KVCache(
            pages,
            config.block_size,
            storage,
            model=self.fingerprint or model.name,
            policy=policy,
            clock=self.clock,
            attention_tokens=model.attention_tokens,
            pin_share=PIN_SHARE,
            prefix_reuse=config.prefix_reuse,
            log=self._log,
            units=units,
            tiers=self._tiers,
        )
        native, self.no_native = None, f"kernels is {self.attention.name}"
        if self.attention.name != "triton":
            native, self.no_native = native_decoder(model, storage, config.kernels)
        kernels = kernel_path(self.attention, storage, model.group)
        guesses = config.speculate == "lookup" or (config.speculate == "auto" and native is not None)
        self._scheduler = Scheduler(self._cache, config, lookup if guesses else None)
        self._sessions = SessionCache(config.max_sessions, config.max_session_tokens)
        self.window = min(config.window or model.window, model.window, pages * config.block_size)
        graphs = None
        if config.cuda_graphs:
            graphs = decode_graphs(
                self.attention, kernels, model.forward, window=self.window, most_rows=config.max_running
            )
            if graphs is None:
                raise ValueError(f"cuda_graphs needs kernels triton, and this is {self.attention.name}")
        self._runner = Runner(model, storage, native, kernels, graphs)
        precision = self.policy or policy_named(config.kv_precision, config.kv_int8_at, config.kv_int4_at)
        self._sealer = Sealer(self._cache, self._sessions, precision, self.window)
        self._intake = Intake(self._sessions, self.window, model.vocab_size, shifts=model.no_shift is None)
        self.suspension = Suspension(self._cache, self._sessions, self._tiers, self.clock, self._is_busy)
        self.suspension.take_up_files()
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
        prompt = seq.tokens[: seq.prompt_len] if _needs_prompt(request) else array("I")
        chooser = TokenChooser(request.sampling, rng, prompt, mask)
        before = seq.tokens[: seq.prompt_len][-8:].tolist()
        text = TextStream(self.model.decode, stops=request.sampling.stop, prompt_tail=before)
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            stop_ids |= self.model.stop_ids
        live = Live(seq, chooser, text, stop_ids, keep=not seq.background)
        if request.generated is not None:
            live.take_up(request.generated)
        self._live[seq.request_id] = live
        self._scheduler.add(seq)
        if seq.num_output and (finish := live.finish) is not None:
            self._ended.append(self._end(live, finish))

    def abort(self, request_id: str) -> None:
        """End a request now; its pages are free or cached when this returns. Unknown ids are nothing."""
        live = self._live.get(request_id)
        if live is not None:
            self._ended.append(self._end(live, "cancelled"))

    # ------------------------------------------------------------------ step
    def has_work(self) -> bool:
        tiers = self._tiers
        return bool(self._live or self._ended or self._sealer.pending) or (tiers is not None and tiers.pending)

    def step(self) -> list[CoreOutput]:
        """Schedule, run, choose; what became of each request."""
        outputs, self._ended = self._ended, []
        if self._tiers is not None:
            self._tiers.poll()
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
        self._sealer.work(self._scheduler.running, SEALED_A_STEP if plan.rows else SEALED_WHEN_IDLE)
        if self._tiers is not None and not plan.rows:
            self._tiers.idle(IDLE_S)
        return outputs

    def _is_busy(self, tag: int) -> bool:
        """Whether a request of that session runs or waits."""
        return any(live.seq.tag == tag for live in self._live.values())

    def _run(self, rows: tuple[Row, ...], outputs: list[CoreOutput]) -> list[tuple[tuple[Row, ...], Logits]]:
        """One forward over all rows; where that fails, one for each, so that only the guilty end in an error."""
        try:
            return [(rows, self._runner.run(rows))]
        except (RuntimeError, ValueError, IndexError) as error:
            if len(rows) == 1:
                outputs.append(self._fail(self._live[rows[0].seq.request_id], f"the forward failed: {error}"))
                return []
            return [done for row in rows for done in self._run((row,), outputs)]

    def _after(self, rows: tuple[Row, ...], logits: Logits) -> list[CoreOutput]:
        self._note_scores(rows, logits.scored)
        board, at = Board(logits.sampled), 0
        taken: dict[Live, Taken] = {}
        for row in rows:
            if row.samples:
                live = self._live[row.seq.request_id]
                taken[live] = live.take(board, at, row.draft, self.model.spell)
                at += row.num_sampled
        for row in rows:
            made, undrafted = taken.get(self._live[row.seq.request_id]), row.count - len(row.draft)
            written = made.written(undrafted) if made is not None else undrafted
            if row.draft:
                row.seq.acceptance.note(len(row.draft), written - undrafted)
            self._counters.note(row, written)
            if made is None or made.failed is None:
                self._cache.advance(row.seq, written)
        return [output for live, made in taken.items() for output in self._given(live, made)]

    def _note_scores(self, rows: tuple[Row, ...], logits: Tensor) -> None:
        at = 0
        for row in rows:
            live = self._live[row.seq.request_id]
            for position in row.seq.scored(row.count):
                live.scores[position] = torch.log_softmax(logits[at], -1)
                at += 1

    def _given(self, live: Live, made: Taken) -> list[CoreOutput]:
        if made.finish is not None:
            return [self._end(live, made.finish, ids=tuple(made.ids), text=made.text, logprobs=made.logprobs)]
        outputs: list[CoreOutput] = []
        if made.ids:
            outputs.append(CoreOutput(live.seq.request_id, ids=tuple(made.ids), text=made.text, logprobs=made.logprobs))
        if made.failed is not None:
            outputs.append(self._fail(live, made.failed))
        return outputs

    # ------------------------------------------------------------------ end
    def _end(
        self,
        live: Live,
        finish: FinishReason,
        *,
        ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> CoreOutput:
        seq, rest = live.seq, live.text.flush()
        text, stop = text + rest.text, rest.stop
        finish = "stop" if stop is not None else finish
        self._scheduler.remove(seq)
        self._leave(live)
        del self._live[seq.request_id]
        scores = b"".join(live.scores[position].cpu().numpy().tobytes() for position in sorted(live.scores))
        return CoreOutput(seq.request_id, None, ids, text, logprobs, finish, stop, live.usage, scores=scores)

    def _leave(self, live: Live) -> None:
        """Give the pages back; a session that has run keeps its path, as ordinary cache."""
        seq = live.seq
        ran = seq.cached_tokens is not None
        if seq.pinned:
            self._cache.pin(seq)
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
        now = self.clock()
        asked = (seq.min_bits, seq.system_tokens, seq.recent_from)
        path = SessionPath(seq.session, seq.salt, seq.tokens, seq.marks, blocks, now, *asked)
        self._sealer.kept(path)
        for gone in self._sessions.put(path):
            self._cache.drop(gone.blocks)

    def _fail(self, live: Live, reason: str) -> CoreOutput:
        seq = live.seq
        self._scheduler.remove(seq)
        self._cache.release(seq, scrub=True)
        del self._live[seq.request_id]
        return CoreOutput(seq.request_id, usage=live.usage, error=reason)

    # ------------------------------------------------------------------ sessions, figures, invariants
    def forget(self, session: str, salt: str) -> Forgotten:
        """Drop a session: its running requests are cancelled, its path goes, and pages that no other session used are
        zeroed and leave the index."""
        tag = session_tag(session, salt)
        self.suspension.forget(session, salt)
        for live in [live for live in self._live.values() if live.seq.tag == tag]:
            live.keep = False
            self.abort(live.seq.request_id)
        path = self._sessions.pop(session, salt)
        gone = self._cache.forget(tag)
        if path is not None:
            self._cache.drop(path.blocks)
            path.ids[:] = array("I", bytes(path.ids.itemsize * len(path.ids)))
        return gone

    def sessions(self) -> list[SessionInfo]:
        """What is kept, the least recently used first."""
        pool = self._cache.pool
        found = []
        for path in self._sessions:
            own, tail = path.blocks, bool(path.blocks.tail_len)
            blocks = int((pool.owner[own.pages] == own.uids).sum())
            blocks += tail and pool.owner[own.tail_page] == own.tail_uid
            size = int(blocks) * pool.units.page_bytes
            found.append(SessionInfo(path.session, path.salt, len(path.ids), int(blocks), size, path.last_used_s))
        return found

    def kv_events(self) -> tuple[KvEvent, ...]:
        """What the pool has stored and removed since the last call; nothing without `config.kv_events`."""
        return self._log.drain() if self._log is not None else ()

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
            drafted_tokens=counters.drafted,
            accepted_tokens=counters.accepted,
            preemptions=self._scheduler.preemptions,
            evictions=pool.evictions,
            blocks_pinned=pool.pinned,
            units_sealed=self._sealer.sealed,
            pool_bytes=pool.total * pool.units.page_bytes + pool.units.own_bytes,
            sealed={precision.codec: count for precision, count in pool.units.taken().items()},
            sealed_bytes=pool.units.nbytes,
            **tier_stats(self._tiers),
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


def _needs_prompt(request: CoreRequest) -> bool:
    return request.sampling.repetition_penalty != 1
