"""Which replica holds which prefix, as far as this gateway can know.

    noted     what our own turns left there: known at once, true until the replica evicts it
    told      what its KV events say: exact, a moment late

Blocks of any size are mapped to the keys of `chain` (`told`); an engine's own names are only a way to find those again.
A replica whose feed is live is believed in what it told, and for a few seconds in what was noted. Without a feed, notes
are kept in order of use up to what the replica can hold. Each answer says how many tokens were really cached: `trust`
sinks where that disagrees. Memory is bounded by replica; one that leaves takes its part along. Knows no HTTP, no clock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engines.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, FeedItem, FeedReset, FeedSnapshot
from gateway.fleet.chain import CHUNK_TOKENS
from gateway.fleet.told import Told, counted

Trust = Literal["exact", "degraded", "guess"]
Feed = Literal["none", "live", "silent", "doubted"]

NOTED_S = 10.0  # a live feed has told of a block by then, or the replica does not hold it
DEFAULT_TOKENS = 1 << 20  # that a replica holds, where it does not say
MARGIN_TOKENS = 1 << 16  # over twice of what a replica can hold, that its feed may tell before it is not believed
DEGRADED_BELOW = 0.9  # of what was predicted, came true lately
LOST_BELOW = 0.3  # what is believed of a replica is thrown away
LEARN = 0.5  # weight of the last answer
RETURN_S = 100.0  # what was not used for t seconds is counted as missed by exp(-t / RETURN_S)


@dataclass(slots=True, eq=False)
class Run:
    """Keys that followed one another when they came, an edge of the tree of paths. `after`: the key of `parent` that
    the first of them follows. `held`: how many still are."""

    parent: Run | None
    after: bytes
    keys: list[bytes]
    used_at: float
    noted_at: float = float("-inf")
    children: int = 0
    held: int = 0


@dataclass(slots=True)
class Held:
    """What is believed of one replica. `ends` holds the runs that nothing follows, least recently used first."""

    model: str = ""
    capacity_tokens: int = DEFAULT_TOKENS
    block_tokens: int = CHUNK_TOKENS  # of the engine's own blocks
    live: bool = False
    right: float = 1.0  # share of what was predicted that came true, the last answers weighing most
    judged: int = 0  # predictions that an answer was compared with, since the replica is known
    came_true: int = 0  # of these
    heard: bool = False  # its feed told something
    last_reset: str = ""  # why its feed began anew
    problem: str = ""  # why its feed is not believed any more
    seen_at: float = 0.0  # when it was last probed, in the life it has
    reset_at: float = 0.0  # when its feed last began anew
    lost_at: float = 0.0  # when its feed last told of a loss
    anew: bool = False  # it was restarted, and its feed has not begun anew yet
    nodes: dict[bytes, Run] = field(default_factory=dict)
    ends: OrderedDict[Run, None] = field(default_factory=OrderedDict)
    told: Told = field(init=False)

    def __post_init__(self) -> None:
        self.told = Told(self._gone)

    @property
    def trust(self) -> Trust:
        if not self.live:
            return "guess"
        return "exact" if self.right >= DEGRADED_BELOW else "degraded"

    @property
    def feed(self) -> Feed:
        """none: nothing came so far; silent: it ended; doubted: it was wrong, and will be heard anew."""
        if self.live or not self.heard:
            return "live" if self.live else "none"
        return "doubted" if self.problem else "silent"

    @property
    def held_tokens(self) -> int:
        return CHUNK_TOKENS * (len(self.told.credits) if self.live else len(self.nodes))

    def credit(self, key: bytes, now: float) -> float:
        """0: not held; 1: on the device."""
        if not self.live:
            return 1.0 if key in self.nodes else 0.0
        found = self.told.credits.get(key)
        if found is not None:
            return found
        run = self.nodes.get(key)
        return 1.0 if run is not None and now - run.noted_at <= NOTED_S else 0.0

    def match(self, keys: Iterable[bytes], now: float) -> tuple[int, float]:
        """Chunks of the longest prefix that is held, and the sum of their credits."""
        chunks, credit = 0, 0.0
        for key in keys:
            one = self.credit(key, now)
            if one == 0.0:
                break
            chunks += 1
            credit += one
        return chunks, credit

    def path_to(self, key: bytes) -> list[bytes]:
        """The keys that led to `key` when they came, itself last, as far back as they are remembered."""
        run, pieces = self.nodes.get(key), list[list[bytes]]()
        while run is not None and key in run.keys:
            pieces.append(run.keys[: run.keys.index(key) + 1])
            key, run = run.after, run.parent
        return [one for piece in reversed(pieces) for one in piece]

    def note(self, parent: bytes, keys: Sequence[bytes], now: float) -> int:
        """A turn of ours left these there, after the chunk `parent` -> tokens of those that nobody had told of."""
        before = len(self.nodes)
        run = self._grow(parent, keys, now)
        while run is not None and run.noted_at < now:
            run.noted_at = now
            run = run.parent
        return max(0, len(self.nodes) - before) * CHUNK_TOKENS

    def _grow(self, parent: bytes, keys: Sequence[bytes], now: float) -> Run | None:
        """`keys` after `parent` in the tree; the run that ends with the last of them, or last was used."""
        at, run = 0, self.nodes.get(parent)
        while at < len(keys) and (known := self.nodes.get(keys[at])) is not None:
            run = known
            at += 1
        if at < len(keys):
            run = self._put(run, parent if at == 0 else keys[at - 1], list(keys[at:]), now)
        if run is not None:
            run.used_at = now
            if run in self.ends:
                self.ends.move_to_end(run)
        self._bound()
        return run

    def _put(self, run: Run | None, parent: bytes, keys: list[bytes], now: float) -> Run:
        if run is not None and not run.children and run.keys and run.keys[-1] == parent:
            run.keys += keys
        else:
            if run is not None:
                run.children += 1
                self.ends.pop(run, None)
            run = Run(run, parent, keys, now)
            self.ends[run] = None
        run.held += len(keys)
        for key in keys:
            other = self.nodes.get(key)
            self.nodes[key] = run
            if other is not None:  # a later piece of a path whose middle was evicted and came back
                other.held -= 1
                self._cut(other)
        return run

    def _bound(self) -> None:
        """Without a feed, forget as the replica would; with one, only what would not fit it twice."""
        most = self.capacity_tokens // CHUNK_TOKENS * (2 if self.live else 1)
        while len(self.nodes) > most and self.ends:
            self._drop(next(iter(self.ends)))

    def _drop(self, run: Run) -> None:
        """Forget an end; the run before it becomes one, and the next to go."""
        for key in run.keys:
            if self.nodes.get(key) is run:
                del self.nodes[key]
        run.held = 0
        self._cut(run)

    def _cut(self, run: Run) -> None:
        """Take an end of which nothing is held out of the tree, and what is an end then and as empty."""
        while not run.held and not run.children:
            del self.ends[run]
            if run.parent is None:
                return
            run = run.parent
            run.children -= 1
            if not run.children:
                self.ends[run] = None
                self.ends.move_to_end(run, last=False)

    def expected_loss(self, tokens: int, now: float) -> float:
        """Tokens that will have to be computed again because `tokens` more push the least recently used out."""
        need = tokens - max(0, self.capacity_tokens - self.held_tokens)
        loss = 0.0
        for run in self.ends:
            if need <= 0:
                break
            back = math.exp(-max(0.0, now - run.used_at) / RETURN_S)
            link: Run | None = run
            while link is not None and link.children <= 1 and need > 0:
                gone = min(need, len(link.keys) * CHUNK_TOKENS)
                loss += back * gone
                need -= gone
                link = link.parent
        return loss

    def forget_all(self) -> None:
        self.nodes.clear()
        self.told.clear()
        self.ends.clear()

    def answered(self, *, predicted: int, reported: int, slack: int) -> None:
        """Compare a prediction with what the replica says was cached; `slack` tokens are no error."""
        if predicted <= slack:
            return
        self.judged += 1
        self.came_true += reported >= predicted - slack
        truth = 1.0 if reported >= predicted - slack else reported / predicted
        self.right += LEARN * (truth - self.right)
        if self.right < LOST_BELOW:
            self._doubt("its answers had less cached than it told")

    def hear(self, item: FeedItem, now: float) -> int:
        """Take in what the replica says; the tokens that it computed for others than us."""
        computed = 0
        match item:
            case FeedReset(rank=rank, reason=reason):
                self._forget(rank)
                self.live = self.heard = True
                self.last_reset, self.problem = reason, ""
                self.reset_at, self.anew = now, False
                self.right = 1.0
            case FeedSnapshot(stored=stored, rank=rank):
                for held in stored:
                    self._stored(held, rank, now)
            case EventBatch(events=events, at=at, rank=rank):
                now = min(now, at)  # one that is replayed was used then
                for event in events:
                    match event:
                        case BlockStored():
                            computed += self._stored(event, rank, now)
                        case BlockRemoved() if counted(event):
                            self.told.remove(event, rank=rank)
                            self.lost_at = now
                        case AllBlocksCleared():
                            self._forget(rank)
                            self.lost_at = now
        return computed

    def awaited(self, since: float, now: float) -> bool:
        """Whether its feed may not have told yet of what was left there at `since`: nothing since it was restarted, or
        too little time has passed, in which it told of no loss."""
        return self.live and (self.anew or (now - since <= NOTED_S and self.lost_at < since))

    def restarted(self) -> None:
        """Another life of it was met: its cache is gone, and with it what is known; unless its feed was quicker, and
        has told of the new life since it was last seen in the old one."""
        if self.live and self.reset_at > self.seen_at:
            return
        self.forget_all()
        self.anew = self.live

    def _doubt(self, why: str) -> None:
        """All that is believed of it is thrown away; only what our turns leave there is noted from now on."""
        self.forget_all()
        self.live, self.problem = False, why

    def _forget(self, rank: int | None) -> None:
        """All of one rank; what the others hold stays, and with it what our turns left somewhere there."""
        if rank is None or not self.told.forget(rank):
            self.forget_all()

    def _stored(self, event: BlockStored, rank: int, now: float) -> int:
        if not counted(event):
            return 0
        start, keys = self.told.store(event, rank=rank, model=self.model)
        blocks = len(self.told.blocks) * min(self.block_tokens, CHUNK_TOKENS)  # many may end no chunk
        most = self.told.ranks * (2 * self.capacity_tokens + MARGIN_TOKENS)
        if max(blocks, len(self.told.credits) * CHUNK_TOKENS) > most:
            self._doubt("it told of more than it can hold: of no removals")
            return 0
        if not keys:
            return 0
        before = len(self.nodes)
        self._grow(start, keys, now)
        return max(0, len(self.nodes) - before) * CHUNK_TOKENS

    def _gone(self, key: bytes) -> None:
        """It is held no more: nor is it where our turns left it."""
        run = self.nodes.pop(key, None)
        if run is not None:
            run.held -= 1
            while run.keys and self.nodes.get(run.keys[-1]) is not run:
                run.keys.pop()
            self._cut(run)
