"""What this gateway believes of its replicas: what each holds, what each was given, and where a turn is best placed.

One value for `Held`, `Traffic` and the ring of all replicas; it decides nothing itself (`cost` does) and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from engines.contract import Usage
from engines.kv_events import FeedItem
from gateway.fleet.chain import CHUNK_TOKENS, Chain, extend
from gateway.fleet.cost import Candidate
from gateway.fleet.residency import Held
from gateway.fleet.ring import HashRing
from gateway.fleet.traffic import Traffic

EMPTY = Chain(b"")
RINGS = 64  # one a model, or a set of replicas that can take a turn


@dataclass(frozen=True, slots=True)
class Path:
    """A prompt as placement sees it.

    | the session's path so far: base_tokens   | the new ids |
    | base: up to its last whole chunk, base.key   | keys: of the chunks that the new ids make whole | end |

    Without `end` its ids are not known: it goes as messages, or is not made yet.
    """

    num_tokens: int
    base_tokens: int = 0
    base: Chain = EMPTY
    keys: tuple[bytes, ...] = ()
    end: Chain = EMPTY

    @property
    def known(self) -> bool:
        """Whether its ids are known: a prompt of chat messages has no keys."""
        return bool(self.end.key)


def path_of(base: Chain, ids: bytes, *, base_tokens: int | None = None) -> Path:
    """`ids` (u32 little-endian) after `base`. `base_tokens`: of the session's path, where `base` is not its end."""
    end, keys = extend(base, ids)
    return Path(end.num_tokens, base.num_tokens if base_tokens is None else base_tokens, base, tuple(keys), end)


class Outlook:
    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.traffic: dict[str, Traffic] = {}
        self._rings: dict[frozenset[str], HashRing] = {}

    def ring(self, names: Iterable[str]) -> HashRing:
        """Of these replicas; made anew only when they change."""
        wanted = frozenset(names)
        if wanted not in self._rings:
            if len(self._rings) >= RINGS:
                self._rings.clear()
            self._rings[wanted] = HashRing(wanted)
        return self._rings[wanted]

    def joined(
        self, name: str, *, model: str, capacity_tokens: int | None, block_tokens: int | None, now: float = 0.0
    ) -> None:
        """It is there, as a probe shows that began at `now`."""
        held = self.held.setdefault(name, Held(model))
        held.seen_at = now
        self.traffic.setdefault(name, Traffic())
        held.model, held.block_tokens = model, block_tokens or CHUNK_TOKENS
        if capacity_tokens:
            held.capacity_tokens = capacity_tokens

    def left(self, name: str) -> None:
        self.held.pop(name, None)
        self.traffic.pop(name, None)

    def restarted(self, name: str) -> None:
        """Its cache is gone; its feed, where it has one, tells anew."""
        if name in self.held:
            self.held[name].restarted()

    def hear(self, name: str, item: FeedItem, now: float) -> None:
        held, traffic = self.held.get(name), self.traffic.get(name)
        if held is not None and traffic is not None:
            traffic.given(held.hear(item, now), now)

    def silent(self, name: str) -> None:
        """Its feed ended: what is noted is all there is from now on."""
        if name in self.held:
            self.held[name].live = False

    def tells(self, name: str) -> bool:
        """Whether the replica says what it holds, and is believed."""
        return name in self.held and self.held[name].live

    def awaited(self, name: str, since: float, now: float) -> bool:
        """Whether its feed may not have told yet of what a turn left there that another gateway ran at `since`."""
        return name in self.held and self.held[name].awaited(since, now)

    def right(self, name: str) -> float:
        return self.held[name].right if name in self.held else 1.0

    def output_tokens(self, name: str) -> float:
        return self.traffic[name].output_tokens if name in self.traffic else 0.0

    def recent(self, name: str, now: float) -> float:
        """Tokens of work that it was lately given, older work counting less."""
        return self.traffic[name].recent(now) if name in self.traffic else 0.0

    def cached(self, name: str, path: Path, now: float, *, home: bool = False) -> float:
        """Tokens of `path` that the replica is believed to hold, less for slower tiers and for replicas that erred.

        `home`: it ran the session's last turn in this life. The end of that path lies in a block that is not whole,
        of which no event tells; where the block before it is held, so is the end.
        """
        held = self.held.get(name)
        if held is None or not path.base.key:
            return 0.0
        if not path.base.chunks:
            return held.match(path.keys, now)[1] * CHUNK_TOKENS * held.right
        for back, key in enumerate((path.base.key, *path.base.last)):
            credit = held.credit(key, now)
            if credit and (home or back == 0):
                chunks, more = held.match(path.keys, now) if path.known else (0, 0.0)
                end = path.base.num_tokens if home and not chunks else path.base.chunks * CHUNK_TOKENS
                return (credit * end + more * CHUNK_TOKENS) * held.right
            if credit:
                return credit * (path.base.chunks - back) * CHUNK_TOKENS * held.right
        return self._shared(held, path.base, now) * CHUNK_TOKENS * held.right

    def _shared(self, held: Held, base: Chain, now: float) -> float:
        """Chunks of the beginning of a session's path that the replica holds, which others have brought there. By the
        path's keys where any replica is believed to hold it whole, else by those that the path remembers."""
        for other in self.held.values():
            keys = other.path_to(base.key)
            if len(keys) == base.chunks:
                return held.match(keys, now)[1]
        known = ((chunks, held.credit(key, now)) for chunks, key in base.remembered())
        return next((credit * chunks for chunks, credit in known if credit), 0.0)

    def candidate(self, name: str, path: Path, now: float, *, home: bool = False) -> Candidate:
        cached = self.cached(name, path, now, home=home)
        held, traffic = self.held.get(name), self.traffic.get(name)
        if held is None or traffic is None:
            return Candidate(name)
        missing = max(0, path.num_tokens - round(cached))
        loss = held.expected_loss(missing, now)
        return Candidate(name, cached, traffic.queued, traffic.recent(now), loss, traffic.answers)

    def sending(self, name: str, turn: str, path: Path, expected: int, now: float) -> Sending:
        """A turn goes to the replica: counted while the context is open."""
        return Sending(self, name, turn, path, expected, now)


@dataclass(slots=True)
class Sending(AbstractContextManager["Sending"]):
    """One turn on its way through one replica."""

    outlook: Outlook
    name: str
    turn: str
    path: Path
    expected: int
    now: float
    begun: bool = False

    def __enter__(self) -> Sending:
        held, traffic = self.outlook.held.get(self.name), self.outlook.traffic.get(self.name)
        if held is not None and traffic is not None:
            traffic.sent(self.turn, max(0, self.path.num_tokens - self.expected), self.now)
            if self.path.known:
                held.note(self.path.base.key, self.path.keys, self.now)
        return self

    def first(self) -> None:
        """Something came: its prompt is read."""
        if not self.begun:
            self.begun = True
            if self.name in self.outlook.traffic:
                self.outlook.traffic[self.name].prefilled(self.turn)

    def ended(self, usage: Usage | None, ids: bytes, now: float, *, judged: bool = True) -> None:
        """The answer is there. `ids`: its own (u32 little-endian). `judged`: what the replica reports as cached is of
        the prompt that was predicted."""
        held, traffic = self.outlook.held.get(self.name), self.outlook.traffic.get(self.name)
        if held is None or traffic is None:
            return
        output = usage.output_tokens if usage is not None else 0
        # an event of the answer may come before its end or after it: what is noted already is counted already
        new = held.note(self.path.end.key, extend(self.path.end, ids)[1], now) if self.path.known else 0
        traffic.ended(self.turn, output, now, untold=new if held.live else output)
        if judged and usage is not None and usage.cached_tokens is not None and not usage.approximate:
            slack = held.block_tokens + CHUNK_TOKENS
            held.answered(predicted=self.expected, reported=usage.cached_tokens, slack=slack)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.name in self.outlook.traffic:
            self.outlook.traffic[self.name].dropped(self.turn)
