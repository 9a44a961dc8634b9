"""The engine's settings: one frozen value, every default with its reason. Read from nowhere; passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engines.local import speculate
from engines.local.kv import precision
from engines.local.kv.policies import DEFAULT_POLICY, POLICIES
from engines.local.kv.quant import UNIT

MIN_BLOCK, MAX_BLOCK = 8, 64
KERNELS = ("auto", "torch", "native", "triton")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    block_size: int = 32  # tokens a page; also the group that key quantization shares a scale over
    pool_bytes: int | None = None  # None: on a GPU all that is free but for a step's need; else `pool_share` of it
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
    eviction: str = DEFAULT_POLICY  # which cached pages go first: one of kv.policies.POLICIES
    kv_events: bool = False  # note what the pool stores and removes (LocalEngine.kv_events)
    host_bytes: int | None = None  # host memory for blocks that the pool evicts; 0: none; None: sizing.host_bytes
    kv_dir: str | None = None  # folder for blocks that host memory gives up, and for suspended sessions; None: none
    disk_bytes: int | None = None  # of files there; None: see sizing.disk_bytes
    remote: str | None = None  # HOST:PORT of a Mooncake Store's master, for suspended sessions; needs kv_dir
    remote_bytes: int = 1 << 30  # of memory that this process lends the store; 0: none
    debug_nan_fill: bool = False  # freed pages are filled with NaN: who reads one is seen
    kv_precision: str = "full"  # a policy of kv/precision.py: which cached blocks go to 8 and to 4 bits
    kv_int8_at: float | None = None  # path length from which on; up to 1 of the window, above tokens. None: its own
    kv_int4_at: float | None = None
    # auto: the compiled decoder on a CPU, Triton on a GPU, if they can; torch: neither; native, triton: or refuse it
    kernels: str = "auto"
    cuda_graphs: bool = False  # with Triton: replay steps that only decode; not yet run on a device
    speculate: str = "auto"  # auto: guess tokens where the compiled decoder runs; lookup: everywhere; off
    seed: int | None = None  # of requests that bring none; None: from the operating system

    def __post_init__(self) -> None:
        if not MIN_BLOCK <= self.block_size <= MAX_BLOCK:
            raise ValueError(f"block_size is {self.block_size}, must be {MIN_BLOCK} to {MAX_BLOCK}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}, must be at least 0 and below 1")
        if self.eviction not in POLICIES:
            raise ValueError(f"eviction is {self.eviction!r}, must be one of {', '.join(POLICIES)}")
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels is {self.kernels!r}, must be one of {', '.join(KERNELS)}")
        if self.speculate not in speculate.CHOICES:
            raise ValueError(f"speculate is {self.speculate!r}, must be one of {', '.join(speculate.CHOICES)}")
        counts = ("max_running", "max_waiting", "max_batch_tokens", "background_chunk", "max_sessions")
        for name in (*counts, "max_session_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise ValueError(f"host_bytes is {self.host_bytes}, must be at least 0")
        if self.kv_dir is not None and (self.host_bytes == 0 or not self.prefix_reuse):
            raise ValueError("kv_dir needs host_bytes, through which it is read, and prefix_reuse")
        if self.disk_bytes is not None and (self.kv_dir is None or self.disk_bytes < 1):
            raise ValueError(f"disk_bytes is {self.disk_bytes}: it is at least 1, and of kv_dir")
        if self.remote is not None and self.kv_dir is None:
            raise ValueError("remote needs kv_dir: a session goes to the store as a file, and comes back as one")
        if self.host_bytes and not self.prefix_reuse:
            raise ValueError("host_bytes keeps blocks that are found again, which prefix_reuse forbids")
        if self.kv_events and not self.prefix_reuse:
            raise ValueError("kv_events tells of blocks that are found again, which prefix_reuse forbids")
        for at in (self.kv_int8_at, self.kv_int4_at):
            if at is not None and not 0 < at < math.inf:
                raise ValueError(f"a path length is {at}: a share of the window up to 1, or tokens")
        if precision.policy_named(self.kv_precision, self.kv_int8_at, self.kv_int4_at).seals:
            if UNIT % self.block_size:
                raise ValueError(
                    f"kv_precision seals {UNIT} tokens at once: block_size {self.block_size} must divide it"
                )
            if not self.prefix_reuse:
                raise ValueError("kv_precision seals blocks that are found again, which prefix_reuse forbids")
        if self.max_running > self.max_batch_tokens:
            raise ValueError(f"max_running {self.max_running} exceeds max_batch_tokens {self.max_batch_tokens}")
