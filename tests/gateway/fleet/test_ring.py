"""The ring: everyone agrees, and a replica that leaves moves only what it had."""

from __future__ import annotations

from collections import Counter

from gateway.fleet.ring import HashRing

NAMES = [f"replica-{n}" for n in range(8)]
KEYS = [f"session-{n}".encode() for n in range(4000)]


def home(ring: HashRing, key: bytes) -> str:
    return next(ring.order(key))


def test_the_order_in_which_replicas_are_named_makes_no_difference() -> None:
    one, other = HashRing(NAMES), HashRing(reversed(NAMES))
    assert all(list(one.order(key)) == list(other.order(key)) for key in KEYS[:100])


def test_every_replica_comes_once() -> None:
    ring = HashRing(NAMES)
    assert all(sorted(ring.order(key)) == NAMES for key in KEYS[:100])


def test_a_replica_that_leaves_moves_its_keys_and_no_others() -> None:
    before, after = HashRing(NAMES), HashRing(NAMES[1:])
    moved = [key for key in KEYS if home(before, key) != home(after, key)]
    assert {home(before, key) for key in moved} == {NAMES[0]}
    assert all(home(before, key) != NAMES[0] for key in set(KEYS) - set(moved))


def test_homes_are_spread_as_far_as_150_points_spread_them() -> None:
    ring = HashRing(NAMES)
    counts = Counter(home(ring, key) for key in KEYS)
    assert max(counts.values()) <= 1.3 * len(KEYS) / len(NAMES)


def test_an_empty_ring_has_no_home() -> None:
    assert list(HashRing([]).order(b"key")) == []
