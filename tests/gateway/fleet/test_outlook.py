"""What an answer teaches of a replica: whether what was expected of its cache came true, and how busy it is."""

from __future__ import annotations

from array import array

import pytest

from engines.contract import Usage
from engines.kv_events import AllBlocksCleared, BlockStored, EventBatch, FeedReset
from gateway.fleet.chain import Chain, extend, root
from gateway.fleet.outlook import Outlook, Path, path_of
from gateway.fleet.traffic import OUTPUT_TOKENS, RECENT_S, Traffic

BLOCK, EXPECTED = 32, 960


def answered(usage: Usage | None, *, judged: bool = True) -> float:
    """How right the replica is after one answer of which EXPECTED tokens were to be cached."""
    outlook = Outlook()
    outlook.joined("a", model="m", capacity_tokens=None, block_tokens=BLOCK)
    outlook.hear("a", FeedReset(None, "start", whole=True), 0.0)
    with outlook.sending("a", "turn", Path(1000), EXPECTED, 0.0) as sending:
        sending.first()
        sending.ended(usage, b"", 1.0, judged=judged)
    return outlook.right("a")


@pytest.mark.parametrize("cached", [1000, EXPECTED, EXPECTED - BLOCK, EXPECTED - BLOCK - 16])
def test_a_block_and_a_chunk_less_than_expected_is_no_error(cached: int) -> None:
    assert answered(Usage(1000, 5, cached)) == 1.0


@pytest.mark.parametrize("cached", [EXPECTED - BLOCK - 17, 0])
def test_more_than_that_is(cached: int) -> None:
    assert answered(Usage(1000, 5, cached)) < 1.0


@pytest.mark.parametrize("usage", [None, Usage(1000, 5), Usage(1000, 5, 0, 400)])
def test_who_does_not_say_or_took_it_from_elsewhere_is_not_judged(usage: Usage | None) -> None:
    assert answered(usage) == 1.0


def test_an_answer_that_another_replica_began_judges_nobody() -> None:
    assert answered(Usage(1000, 5, 0), judged=False) == 1.0


def test_answers_on_their_way_are_work_until_they_are_told() -> None:
    traffic = Traffic()
    traffic.sent("one", 20, 0.0)
    traffic.sent("two", 20, 0.0)
    assert (traffic.recent(0.0), traffic.answers) == (40, 2 * OUTPUT_TOKENS)
    assert traffic.queued == traffic.recent(0.0) + traffic.answers
    traffic.ended("one", 300, 0.0, untold=300)
    assert (traffic.recent(0.0), traffic.answers) == (340, traffic.output_tokens)
    traffic.dropped("two")
    assert (traffic.recent(0.0), traffic.answers) == (340, 0)


def test_what_comes_late_makes_no_work_young_again() -> None:
    traffic = Traffic()
    traffic.given(1000, 0.0)
    traffic.given(0, RECENT_S)
    before = traffic.recent(RECENT_S)
    traffic.given(0, 0.0)  # replayed, or a clock was set back
    assert traffic.recent(RECENT_S) == pytest.approx(before)
    assert traffic.recent(2 * RECENT_S) < before


@pytest.mark.parametrize("told", ["before its end", "after it", "never, there is no feed"])
def test_an_answer_counts_once_whether_its_events_come_before_its_end_or_after_it(told: str) -> None:
    salt, prompt, answer = root(salt="", model="m"), bytes(4 * 64), b"\1" * 4 * 32
    outlook = Outlook()
    outlook.joined("a", model="m", capacity_tokens=None, block_tokens=BLOCK)
    if told != "never, there is no feed":
        outlook.hear("a", FeedReset(None, "start", whole=True), 0.0)
    whole = EventBatch(0, 0.0, 0, (BlockStored((b"0", b"1", b"2"), None, prompt + answer, BLOCK),))
    with outlook.sending("a", "turn", path_of(salt, prompt), 0, 0.0) as sending:
        if told == "before its end":
            outlook.hear("a", whole, 0.0)
        sending.ended(Usage(64, 32, 0), answer, 0.0)
        if told == "after it":
            outlook.hear("a", whole, 0.0)
    assert outlook.recent("a", 0.0) == 64 + 32


def test_a_session_that_moves_is_expected_to_find_what_it_shares_with_others() -> None:
    outlook, salt = Outlook(), root(salt="s", model="m")
    for name in ("home", "other"):
        outlook.joined(name, model="m", capacity_tokens=None, block_tokens=BLOCK)
    shared = bytes(4 * 96)
    first = path_of(salt, shared + b"\1" * 4 * 200)
    outlook.held["home"].note(first.base.key, first.keys, 0.0)
    begun = extend(salt, shared + b"\2" * 4 * 40)
    outlook.held["home"].note(salt.key, begun[1], 0.0)  # another session with the same beginning, there ...
    elsewhere = path_of(salt, shared + b"\3" * 4 * 200)
    outlook.held["other"].note(elsewhere.base.key, elsewhere.keys, 0.0)  # ... and elsewhere
    for went in (first.end, begun[0]):
        next_turn = path_of(went, b"\4" * 4 * 50)
        assert outlook.cached("home", next_turn, 1.0) >= went.chunks * 16
        assert outlook.cached("other", next_turn, 1.0) == 96
    outlook.left("home")
    assert outlook.cached("other", path_of(first.end, b"\4" * 4 * 50), 1.0) == 96, "by what the path itself remembers"


def test_a_session_whose_home_lost_its_cache_is_expected_to_find_what_others_brought_back() -> None:
    outlook, salt = Outlook(), root(salt="s", model="m")
    outlook.joined("home", model="m", capacity_tokens=None, block_tokens=BLOCK)
    shared = bytes(4 * 16 * 37)
    went = path_of(salt, shared + b"\1" * 4 * 5000)
    outlook.held["home"].note(went.base.key, went.keys, 0.0)
    outlook.restarted("home")
    next_turn = path_of(Chain.of_text(went.end.as_text()), b"\4" * 4 * 50)
    assert outlook.cached("home", next_turn, 1.0) == 0
    other = path_of(salt, shared + b"\2" * 4 * 400)
    outlook.held["home"].note(other.base.key, other.keys, 0.0)
    assert outlook.cached("home", next_turn, 1.0) == 16 * 36, "marks past 32 chunks are four apart"


@pytest.mark.parametrize("quicker", ["feed", "probe"])
def test_what_the_feed_tells_of_a_new_life_stands_whichever_is_noticed_first(quicker: str) -> None:
    outlook, salt = Outlook(), root(salt="", model="m")

    def ids(id: int) -> bytes:
        return array("I", [id] * BLOCK).tobytes()

    def batch(id: int) -> EventBatch:
        return EventBatch(0, 10.0, 0, (BlockStored((bytes([id]),), None, ids(id), BLOCK),))

    outlook.joined("a", model="m", capacity_tokens=None, block_tokens=BLOCK, now=10.0)
    outlook.hear("a", FeedReset(None, "start", whole=True), 5.0)
    outlook.hear("a", batch(9), 6.0)

    def heard() -> None:
        outlook.hear("a", FeedReset(None, "another life", whole=True), 11.0)
        outlook.hear("a", batch(7), 11.0)

    if quicker == "feed":
        heard()
    outlook.restarted("a")
    assert outlook.awaited("a", 0.0, 20.0) == (quicker == "probe")
    if quicker == "probe":
        heard()
    assert not outlook.awaited("a", 0.0, 20.0)
    old, told = (path_of(salt, ids(id)) for id in (9, 7))
    assert (outlook.cached("a", old, 20.0), outlook.cached("a", told, 20.0)) == (0, BLOCK)


def test_what_another_gateway_left_a_moment_ago_is_awaited_until_a_loss_is_told() -> None:
    outlook = Outlook()
    outlook.joined("a", model="m", capacity_tokens=None, block_tokens=BLOCK)
    assert not outlook.awaited("a", 100.0, 101.0), "it tells of nothing"
    outlook.hear("a", FeedReset(None, "start", whole=True), 50.0)
    assert outlook.awaited("a", 100.0, 101.0)
    assert not outlook.awaited("a", 100.0, 111.0)
    outlook.hear("a", EventBatch(0, 100.5, 0, (AllBlocksCleared(),)), 100.6)
    assert not outlook.awaited("a", 100.0, 101.0)
