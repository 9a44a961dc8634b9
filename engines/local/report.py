"""What the engine core says: of one request after a step, of its sessions, and of itself. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.contract import FinishReason, TokenLogprob, Usage


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
    scores: bytes = b""  # of the last one: float32 little-endian [scored tokens, vocab], log-probabilities


@dataclass(frozen=True, slots=True)
class SessionInfo:
    session: str
    salt: str
    tokens: int
    blocks: int  # that still hold what the session wrote
    bytes: int  # of these blocks on the device, at full precision: at most what they take
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
    shifted_tokens: int  # prompt tokens copied from another position of a kept path
    drafted_tokens: int  # guessed, and run to see
    accepted_tokens: int  # of those, that were right
    preemptions: int
    evictions: int
    blocks_pinned: int  # of the cached ones: kept before others
    units_sealed: int = 0  # encoded since the start; one counts again for each precision it goes down to
    pool_bytes: int = 0
    sealed_bytes: int = 0  # of `pool_bytes`, metadata counted
    tiers: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict
    )  # below the pool, by name: bytes, capacity, blocks
    host_tokens: int = 0  # of `cached_tokens`, from host memory
    disk_tokens: int = 0  # and from files
    disk_failed_writes: int = 0  # after each of which nothing is written for a while
    disk_failed_reads: int = 0  # files that could not be read, or were not what had been written
    remote_failed: int = 0  # sessions that were not sent to a remote store, brought from there, or removed
    disk_refused_files: int = 0  # that were found at the start and are of no use
    demoted_tokens: int = 0  # K/V that left the pool for a tier below
    pieces_lost: int = 0  # that no tier had room for
    pieces_damaged: int = 0  # that were not what had been written, so that their tokens were computed
    sealed: Mapping[str, int] = field(default_factory=dict)  # units of 64 tokens in the pool, by codec
