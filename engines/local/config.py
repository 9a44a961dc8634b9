"""The engine's settings: one frozen value, every default with its reason. Read from nowhere; passed in."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK, MAX_BLOCK = 8, 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    block_size: int = 32  # tokens a page; also the group that key quantization shares a scale over
    pool_bytes: int | None = None  # None: `pool_share` of the memory that is free at start, at most `pool_bytes_cap`
    pool_share: float = 0.25
    pool_bytes_cap: int = 4 << 30  # of the automatic size on a CPU, where other processes live too
    max_running: int = 32  # sequences in one batch
    max_waiting: int = 512  # beyond: EngineOverloaded
    max_batch_tokens: int = 512  # of one forward: decode tokens first, the rest is prefill chunks
    background_chunk: int = 32  # most tokens of a step of background work: a foreground prompt waits for one such step
    watermark: float = 0.05  # share of the pool that admission leaves free while others run: fewer preemptions
    max_sessions: int = 1000  # kept paths
    max_session_tokens: int = 32_000_000  # ids of all kept paths together, 4 bytes each
    max_logprobs: int = 20
    window: int | None = None  # tokens; None: the model's own
    prefix_reuse: bool = True
    debug_nan_fill: bool = False  # freed pages are filled with NaN: who reads one is seen
    seed: int | None = None  # of requests that bring none; None: from the operating system

    def __post_init__(self) -> None:
        if not MIN_BLOCK <= self.block_size <= MAX_BLOCK:
            raise ValueError(f"block_size is {self.block_size}, must be {MIN_BLOCK} to {MAX_BLOCK}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}, must be at least 0 and below 1")
        counts = ("max_running", "max_waiting", "max_batch_tokens", "background_chunk", "max_sessions")
        for name in (*counts, "max_session_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_running > self.max_batch_tokens:
            raise ValueError(f"max_running {self.max_running} exceeds max_batch_tokens {self.max_batch_tokens}")
