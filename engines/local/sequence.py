"""One request inside the engine: its ids, how far its K/V is written, and which pages hold it. Knows no tensors.

tokens   | reused | prefilled | decoded        | last |
         0     cached      prompt_len      written   len(tokens)     the last id is sampled, its K/V not yet written
table    page of every block touched so far
uids     names of the full blocks that are published in the prefix index

With a KV shift, K/V further on is there before what lies in between: `written` jumps over it when it gets there.

tokens   | reused | prefilled |  copied ahead  | prefilled, decoded |
         0     cached    ahead_start        ahead_stop          len(tokens)      exact up to ahead_start
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engines.contract import Base, Sampling, Shift
from engines.local.kv.prefix import Node
from engines.local.kv.session_cache import KeptBlocks
from engines.local.kv.shift import Moved


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
    cached_tokens: int | None = None  # reused at the first admission; None: not admitted yet
    preempted: bool = False  # `hint` is its own
    moved: Moved | None = None  # what may be copied from another position of the session's former path
    ahead_start: int = 0
    ahead_stop: int = 0  # 0: nothing was copied ahead
    shifted_tokens: int = 0  # the most that ever was

    @property
    def background(self) -> bool:
        """Whether it runs only where no foreground sequence does."""
        return self.priority > 0

    @property
    def order(self) -> tuple[int, int]:
        """Who runs first: priority, then arrival."""
        return (self.priority, self.arrival)

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
