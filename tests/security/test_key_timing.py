"""How long the check of an API key takes says nothing of how near a guess was: wrong keys that share more and more of a
real one are timed against each other, and a comparison that leaks is told apart by the same test.

A guess is looked up by its HMAC, so keys that begin alike have nothing in common where they are compared. What is timed
is the whole check behind a request: header, HMAC, the look-up in the store, the comparison. No guess comes twice: a key
that was refused is remembered for two seconds, and refused sooner the second time. Nor is it asked here how long the
check of a key takes that once was good: whoever has that one knows it.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.api.access import Access
from gateway.errors import Unauthorized
from gateway.store.schema import migrate
from gateway.store.sessions import open_store
from gateway.tenancy import identify, key_digest, new_key

SECRET = b"s" * 32
NOW = 1_800_000_000.0
SHARED = (3, 11, 25, 38)  # characters of the real key that a guess has: no secret one, what lists show, half, most
ROUNDS = 4_000  # of each kind, in turns, so that what the machine does meanwhile falls on all alike
LARGEST = 0.02  # of the median: the most that two kinds may differ by, in either direction
PERMUTATIONS = 200

pytestmark = [pytest.mark.prove, pytest.mark.anyio]


def guess(key: str, shared: int, dice: random.Random) -> str:
    """A wrong key whose first `shared` characters are the real one's, and whose next is not."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    rest = [dice.choice(letters) for _ in range(len(key) - shared)]
    while rest[0] == key[shared]:
        rest[0] = dice.choice(letters)
    return key[:shared] + "".join(rest)


async def timed(check: Callable[[str], Awaitable[None]], key: str, rounds: int) -> dict[int, list[float]]:
    """Shared characters -> seconds of each check, the kinds in random turns."""
    dice = random.Random(7)
    taken: dict[int, list[float]] = {shared: [] for shared in SHARED}
    asked = [  # made before: between two checks the same is done, whatever the kind
        (shared, guess(key, shared, dice)) for _ in range(rounds) for shared in dice.sample(SHARED, len(SHARED))
    ]
    gc.disable()
    try:
        for shared, wrong in asked:
            began = time.perf_counter()
            await check(wrong)
            taken[shared].append(time.perf_counter() - began)
    finally:
        gc.enable()
    return taken


def spread(taken: dict[int, list[float]]) -> tuple[float, float]:
    """(largest difference of two medians as a share of all's, how often one as large comes of shuffling the kinds)."""
    kinds = list(taken.values())
    whole = statistics.median(value for kind in kinds for value in kind)

    def widest(groups: list[list[float]]) -> float:
        medians = [statistics.median(group) for group in groups]
        return (max(medians) - min(medians)) / whole

    seen, dice = widest(kinds), random.Random(11)
    as_large = 0
    for _ in range(PERMUTATIONS):
        rows = [dice.sample(row, len(row)) for row in zip(*kinds, strict=True)]  # within a round: paired
        as_large += widest([list(column) for column in zip(*rows, strict=True)]) >= seen
    return seen, (as_large + 1) / (PERMUTATIONS + 1)


async def test_the_check_of_a_key_takes_as_long_however_near_the_guess(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/turnkeep.db"
    await migrate(url)
    async with open_store(url) as store:
        access = Access(store, SECRET, auth=True, clock=time.time)
        keys = [
            access.new_key(tenant_id="acme", name="x", scopes=frozenset({"chat"}), expires_at=None) for _ in range(50)
        ]
        for _, record in keys:
            await store.add_key(record)

        async def check(wrong: str) -> None:
            with pytest.raises(Unauthorized):
                await access.identity(f"Bearer {wrong}")

        await timed(check, keys[0][0], 200)
        difference, chance = spread(await timed(check, keys[0][0], ROUNDS))
    print(f"\nlargest difference of medians {difference:.2%}, p = {chance:.3f}, {ROUNDS} checks of each of {SHARED}")
    assert difference < LARGEST or chance > 0.01


async def test_a_comparison_that_ends_at_the_first_difference_is_told_apart() -> None:
    """The control: the same test, of a check that compares the keys themselves, character by character."""
    key, record = new_key(SECRET, name="x", now=NOW)

    async def leaky(wrong: str) -> None:
        for ours, theirs in zip(key, wrong, strict=True):
            if ours != theirs:
                break
        with pytest.raises(Unauthorized):
            identify(key_digest(SECRET, wrong), record, NOW)
        await asyncio.sleep(0)

    await timed(leaky, key, 200)
    difference, chance = spread(await timed(leaky, key, ROUNDS))
    print(f"\nleaky: largest difference of medians {difference:.2%}, p = {chance:.3f}")
    assert chance <= 0.01
    assert difference > LARGEST
