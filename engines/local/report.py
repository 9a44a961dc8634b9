"""What the engine core says: of one request after a step, of its sessions, and of itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass

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
    shifted_tokens: int  # prompt tokens copied from another position of a kept path
    preemptions: int
    evictions: int
