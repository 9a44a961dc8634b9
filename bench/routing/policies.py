"""Ways to choose a replica: ours as the gateway runs it, and the published rules of others, restated.

    round robin            one after the other
    least load             the fewest tokens still ahead
    plain ring             consistent hashing of the conversation's first own block, 150 points a replica
    prefix trie            production-stack's `prefixaware`: the longest match of a trie that never forgets, no load
    smg cache-aware        over thresholds of imbalance (64 and 1.5 times) the shortest queue; else the longest match of
                           a tree for each worker if it is over half of the prompt, else the smallest tree

Each policy sees what its router would see: its own decisions, and KV events where it listens to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Protocol

from bench.routing.replicas import SimulatedReplica
from bench.routing.trace import Asked, BlockLru, ids_of
from engines.kv_events import FeedReset, decode_batch
from gateway.fleet.chain import CHUNK_TOKENS, extend, root
from gateway.fleet.cost import Candidate, cheapest
from gateway.fleet.residency import Held
from gateway.fleet.ring import HashRing
from gateway.fleet.traffic import Traffic

MODEL = "trace"
REPLAYED = 10_000  # batches that an engine keeps for a late subscriber (vLLM's default)


class Policy(Protocol):
    def choose(self, number: int, request: Asked, now: float) -> int:
        """Index of the replica."""
        ...

    def ended(self, number: int, replica: int, request: Asked, now: float) -> None: ...

    def restart(self, now: float) -> None:
        """The router dies and comes back with nothing but what a late subscriber gets."""
        ...


class _Queues:
    """Requests and tokens that a router knows to be under way."""

    def __init__(self, replicas: int) -> None:
        self.requests = [0] * replicas
        self.tokens = [0.0] * replicas

    def add(self, replica: int, request: Asked, sign: int = 1) -> None:
        self.requests[replica] += sign
        self.tokens[replica] += sign * (request.prompt_tokens + request.output_tokens)

    def clear(self) -> None:
        self.requests = [0] * len(self.requests)
        self.tokens = [0.0] * len(self.tokens)


class RoundRobin:
    def __init__(self, replicas: Sequence[SimulatedReplica], random: Random) -> None:
        self._size, self._next = len(replicas), count()

    def choose(self, number: int, request: Asked, now: float) -> int:
        return next(self._next) % self._size

    def ended(self, number: int, replica: int, request: Asked, now: float) -> None:
        pass

    def restart(self, now: float) -> None:
        pass


class LeastLoad:
    def __init__(self, replicas: Sequence[SimulatedReplica], random: Random) -> None:
        self._queues, self._random = _Queues(len(replicas)), random

    def choose(self, number: int, request: Asked, now: float) -> int:
        tokens = self._queues.tokens
        least = min(tokens)
        chosen = self._random.choice([i for i, one in enumerate(tokens) if one == least])
        self._queues.add(chosen, request)
        return chosen

    def ended(self, number: int, replica: int, request: Asked, now: float) -> None:
        if self._queues.requests[replica] > 0:
            self._queues.add(replica, request, -1)

    def restart(self, now: float) -> None:
        self._queues.clear()


class PlainRing(RoundRobin):
    def __init__(self, replicas: Sequence[SimulatedReplica], random: Random) -> None:
        self._names = {replica.name: number for number, replica in enumerate(replicas)}
        self._ring = HashRing(self._names)

    def choose(self, number: int, request: Asked, now: float) -> int:
        return self._names[next(self._ring.order(ids_of(request.blocks[min(1, len(request.blocks) - 1)])))]


class PrefixTrie(LeastLoad):
    def __init__(self, replicas: Sequence[SimulatedReplica], random: Random) -> None:
        super().__init__(replicas, random)
        self._seen: list[set[int]] = [set() for _ in replicas]

    def choose(self, number: int, request: Asked, now: float) -> int:
        matched = [_prefix(request.blocks, seen) for seen in self._seen]
        longest = max(matched)
        near = [i for i, one in enumerate(matched) if one == longest]
        chosen = self._random.choice(near)
        self._seen[chosen].update(request.blocks)
        return chosen

    def restart(self, now: float) -> None:
        self._seen = [set() for _ in self._seen]


class SmgCacheAware(LeastLoad):
    ABSOLUTE, RELATIVE, SHARE = 64, 1.5, 0.5

    def __init__(self, replicas: Sequence[SimulatedReplica], random: Random) -> None:
        super().__init__(replicas, random)
        self._capacity = replicas[0].cache.capacity
        self._trees = [BlockLru(self._capacity) for _ in replicas]

    def choose(self, number: int, request: Asked, now: float) -> int:
        busy = self._queues.requests
        if max(busy) - min(busy) > self.ABSOLUTE and max(busy) > self.RELATIVE * min(busy):
            chosen = busy.index(min(busy))
        else:
            matched = [tree.matched(request.blocks) for tree in self._trees]
            if max(matched) > self.SHARE * len(request.blocks):
                chosen = matched.index(max(matched))
            else:
                sizes = [len(tree) for tree in self._trees]
                chosen = self._random.choice([i for i, one in enumerate(sizes) if one == min(sizes)])
        self._trees[chosen].use(request.blocks)
        self._queues.add(chosen, request)
        return chosen

    def restart(self, now: float) -> None:
        super().restart(now)
        self._trees = [BlockLru(self._capacity) for _ in self._trees]


class Gateway:
    """One of our gateways: the production residency, traffic and cost, fed by bytes."""

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._replicas = replicas
        self._ring = HashRing(replica.name for replica in replicas)
        self._root = root(salt="", model=MODEL)
        self.start()

    def start(self) -> None:
        self.held = [Held(MODEL, (r.cache.capacity or 0) * CHUNK_TOKENS) for r in self._replicas]
        self.traffic = [Traffic() for _ in self._replicas]
        for held in self.held:
            held.hear(FeedReset(None, "subscribed", whole=True), 0.0)

    def restart(self, now: float) -> None:
        """A late subscriber is told what the engines still have in their replay buffers."""
        self.start()
        for held, replica in zip(self.held, self._replicas, strict=True):
            for seq in range(max(0, len(replica.batches) - REPLAYED), len(replica.batches)):
                held.hear(decode_batch(seq, replica.batches[seq]), now)

    def hear(self, arrived: Sequence[Sequence[tuple[float, int]]]) -> None:
        for held, traffic, replica, batches in zip(self.held, self.traffic, self._replicas, arrived, strict=True):
            for at, seq in batches:
                traffic.given(held.hear(decode_batch(seq, replica.batches[seq]), at), at)

    def choose(self, number: int, request: Asked, now: float) -> int:
        end, keys = extend(self._root, b"".join(map(ids_of, request.blocks)))
        candidates = []
        for replica, held, traffic in zip(self._replicas, self.held, self.traffic, strict=True):
            chunks, credit = held.match(keys, now)
            missing = (len(keys) - chunks) * CHUNK_TOKENS
            candidates.append(
                Candidate(
                    replica.name,
                    credit * CHUNK_TOKENS,
                    traffic.queued,
                    traffic.recent(now),
                    held.expected_loss(missing, now),
                    traffic.answers,
                )
            )
        choice = cheapest(candidates, prompt_tokens=round(request.prompt_tokens), key=end.key, ring=self._ring)
        assert choice is not None
        chosen = next(i for i, replica in enumerate(self._replicas) if replica.name == choice.name)
        self.held[chosen].note(self._root.key, keys, now)
        self.traffic[chosen].sent(str(number), max(0.0, request.prompt_tokens - choice.cached), now)
        return chosen

    def ended(self, number: int, replica: int, request: Asked, now: float) -> None:
        self.traffic[replica].ended(str(number), round(request.output_tokens), now, untold=round(request.output_tokens))


class Ours:
    """Two gateways, requests to each in turn; the first of them dies half way."""

    GATEWAYS = 2

    def __init__(self, replicas: Sequence[SimulatedReplica], random: Random) -> None:
        self._replicas = replicas
        self._gateways = [Gateway(replicas) for _ in range(self.GATEWAYS)]
        self._chosen_by: dict[int, Gateway] = {}
        self._next = [0 for _ in replicas]  # sequence number of the next batch; one that is missing is asked for again

    def choose(self, number: int, request: Asked, now: float) -> int:
        arrived = [self._due(number, now) for number in range(len(self._replicas))]
        if any(arrived):
            for gateway in self._gateways:
                gateway.hear(arrived)
        gateway = self._chosen_by[number] = self._gateways[number % self.GATEWAYS]
        return gateway.choose(number, request, now)

    def ended(self, number: int, replica: int, request: Asked, now: float) -> None:
        self._chosen_by.pop(number).ended(number, replica, request, now)

    def restart(self, now: float) -> None:
        self._gateways[0].restart(now)

    def _due(self, number: int, now: float) -> list[tuple[float, int]]:
        """Batches that arrived, and those that were lost before them: a gap is seen, and filled, with the next one."""
        due, arrivals = [], self._replicas[number].arrivals
        while arrivals and arrivals[0][0] <= now:
            at, seq = arrivals.popleft()
            due += [(at, missed) for missed in range(self._next[number], seq + 1)]
            self._next[number] = seq + 1
        return due


def _prefix(blocks: Sequence[int], seen: set[int]) -> int:
    for place, block in enumerate(blocks):
        if block not in seen:
            return place
    return len(blocks)


POLICIES: dict[str, type[Policy]] = {
    "ours": Ours,
    "round robin": RoundRobin,
    "least load": LeastLoad,
    "plain ring": PlainRing,
    "prefix trie (production-stack)": PrefixTrie,
    "cache-aware (smg)": SmgCacheAware,
}
