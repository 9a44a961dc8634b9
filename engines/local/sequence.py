"""One request inside the engine: its ids, how far its K/V is written, and which pages hold it. Knows no tensors.

tokens   | reused | prefilled | decoded        | last |
         0     cached      prompt_len      written   len(tokens)     the last id is sampled, its K/V not yet written
table    page of every block touched so far
uids     names of the full blocks that are published in the prefix index

The ids of an answer that began elsewhere are output from the start: they lie beyond prompt_len, and are prefilled.

With a KV shift, K/V further on is there before what lies in between: `written` jumps over it when it gets there.

tokens   | reused | prefilled |  copied ahead  | prefilled, decoded |
         0     cached    ahead_start        ahead_stop          len(tokens)      exact up to ahead_start
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engines.contract import Base, Generated, Sampling, Shift
from engines.local.kv.prefix import Node
from engines.local.kv.session_cache import KeptBlocks
from engines.local.kv.shift import Moved
from engines.local.kv.tiers.disk import Fetch
from engines.local.speculate import Acceptance


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request as the engine takes it: the prompt is the session's path up to `base`, then `delta`."""

    request_id: str
    delta: bytes  # u32 little-endian
    base: Base | None
    session: str | None
    salt: str
    priority: int
    sampling: Sampling
    shift: Shift | None = None
    generated: Generated | None = None  # its ids are the end of `delta`
    pinned: bool = False  # the full blocks of its system prompt (else of its prompt) are kept before others
    min_bits: int = 0  # the fewest bits that reused K/V may have, or have been made from; 0: any
    system_tokens: int = 0  # of the prompt's beginning, which keep all their bits
    recent_from: int = 0  # from here on are the last turns, which keep all their bits; 0: the session's marks say
    score_from: int | None = None  # tell the log-probabilities after each prompt token from this one on


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    tokens: array[int]  # u32
    prompt_len: int
    sampling: Sampling
    salt: str
    priority: int
    arrival: int  # serial number
    submitted_s: float
    session: str | None = None
    tag: int = 0  # of the session, for the pool's books
    marks: dict[int, bytes] = field(default_factory=dict)  # length -> digest, up to the prompt's end
    hint: KeptBlocks | None = None  # where K/V of the path's beginning was last seen
    hint_len: int = 0  # ids that the hint's path and this one have in common
    table: array[int] = field(default_factory=lambda: array("i"))
    uids: array[int] = field(default_factory=lambda: array("q"))
    node: Node | None = None  # of the last published block, or the root; held while the sequence runs
    written: int = 0
    host_tokens: int = 0  # of the cached ones, that came up from host memory
    disk_tokens: int = 0  # and from a disk
    fetch: Fetch | None = None  # what a disk was asked to bring for it
    cached_tokens: int | None = None  # reused at the first admission; None: not admitted yet
    preempted: bool = False  # `hint` is its own
    moved: Moved | None = None  # what may be copied from another position of the session's former path
    ahead_start: int = 0
    ahead_stop: int = 0  # 0: nothing was copied ahead
    shifted_tokens: int = 0  # the most that ever was
    pinned: bool = False  # the full blocks of its system prompt (else of its prompt) are kept before others
    min_bits: int = 0  # K/V of fewer is not reused for it
    system_tokens: int = 0
    recent_from: int = 0
    score_from: int | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)  # of tokens guessed for it
    lineage: int = 16  # the fewest bits among the blocks that what it computes now is made from

    @property
    def background(self) -> bool:
        """Whether it runs only where no foreground sequence does."""
        return self.priority > 0

    @property
    def order(self) -> tuple[int, int]:
        """Who runs first: priority, then arrival."""
        return (self.priority, self.arrival)

    @property
    def reusable(self) -> int:
        """Tokens whose K/V may be reused: the last is run for its logits, and so are those that are scored."""
        last = len(self.tokens) - 1
        return last if self.score_from is None else min(last, self.score_from)

    def scored(self, count: int) -> range:
        """Positions among the next `count` whose log-probabilities are asked for."""
        if self.score_from is None:
            return range(0)
        return range(max(self.written, self.score_from), min(self.written + count, self.prompt_len))

    @property
    def remaining(self) -> int:
        """Tokens whose K/V is not written: 1 while decoding."""
        return len(self.tokens) - self.written

    @property
    def exact(self) -> int:
        """Written tokens, from the first on, that rest on nothing approximate."""
        return min(self.written, self.ahead_start) if self.ahead_stop else self.written

    @property
    def run_stop(self) -> int:
        """Where the next forward must stop: before what was copied ahead."""
        return self.ahead_start if self.written < self.ahead_start else len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len
