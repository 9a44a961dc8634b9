"""Sessions that a small pool cannot hold come back from host memory: the same answers, and nothing computed twice."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from engines.kv_events import BlockStored
from engines.local.engine import LocalEngine
from engines.local.kv.session_cache import session_tag
from engines.local.kv.tiers.piece import Piece
from tests.engines.local.test_sessions_core import Talk, ids
from tests.engines.local.tiny import Answers, tiny_engine

ROOM = 1 << 20


def host_pieces(engine: LocalEngine) -> list[Piece]:
    assert engine._tiers is not None
    return list(engine._tiers.host.pieces())


def talks(engine: LocalEngine, sessions: int, turns: int, *, length: int = 20) -> list[int]:
    """Sessions in turn -> of each turn after the first round, how many tokens of its path were computed again."""
    run = Answers(engine)
    all_talks = [Talk(run, f"s{n}", salt="t") for n in range(sessions)]
    missed: list[int] = []
    for turn in range(turns):
        for number, talk in enumerate(all_talks):
            before = len(talk.path)
            name = talk.say(ids(100 * turn + number, length), 4)
            if turn:
                missed.append(before - 1 - run.cached[name])
    return missed


def test_five_sessions_on_room_for_one_lose_nothing() -> None:
    engine = tiny_engine(10, host_bytes=ROOM)
    assert set(talks(engine, 5, 3)) == {0}  # not even of the partial tails
    stats = engine.stats()
    assert stats.host_tokens > 0
    assert stats.tiers["host"]["bytes"] <= stats.tiers["host"]["capacity"] == ROOM
    assert not stats.pieces_lost


def test_without_the_tier_they_are_computed_again() -> None:
    engine = tiny_engine(10, host_bytes=0)
    assert min(talks(engine, 5, 3)) > 0
    assert engine.stats().tiers == {}


def evicted(salt: str = "t", **settings: object) -> Talk:
    """A session of 64 tokens that lies in host memory, seven blocks and a tail, because others came after it."""
    engine = tiny_engine(10, host_bytes=ROOM, eviction="lru", **settings)
    talk = Talk(Answers(engine), "s", salt=salt)
    talk.say(ids(1, 60), 4)
    Talk(talk.run, "other", salt="t").say(ids(2, 70), 4)
    return talk


def test_an_answer_says_how_much_came_from_host_memory() -> None:
    talk = evicted()
    usage = talk.run.last[talk.say(ids(3, 4), 4)].usage
    assert usage is not None
    assert usage.cached_tokens == 63
    assert usage.host_tokens == 63


def test_host_memory_is_bounded_and_gives_up_what_is_worth_least() -> None:
    page = 4096  # a page of the tiny model takes less, and is given this much room
    engine = tiny_engine(10, host_bytes=9 * page, eviction="lru")
    talks(engine, 5, 2)
    stats = engine.stats()
    assert stats.tiers["host"]["bytes"] == 9 * page
    assert engine._tiers is not None
    assert engine._tiers.host.fell > 0


def test_a_flipped_bit_costs_a_computation_and_no_answer() -> None:
    talk = evicted()
    engine = talk.run.engine
    third = next(piece for piece in host_pieces(engine) if piece.token_bytes == block(talk, 3))
    assert engine._tiers is not None
    engine._tiers.host.content(third)[7] ^= 64
    name = talk.say(ids(3, 4), 4)  # compares with what any right engine says
    assert talk.run.cached[name] == 3 * 8
    assert engine.stats().pieces_damaged == 1
    assert third not in host_pieces(engine)


def test_another_tenants_blocks_are_not_found() -> None:
    talk = evicted(salt="one")
    other = Talk(Answers(talk.run.engine), "s", salt="two")
    assert other.run.cached[other.say(ids(1, 60), 4)] == 0
    assert talk.run.cached[talk.say([], 4)] == 63


def test_what_is_forgotten_is_in_no_tier() -> None:
    talk = evicted()
    engine = talk.run.engine
    mine = [piece for piece in host_pieces(engine) if piece.users == {session_tag("s", "t")}]
    assert len(mine) == 8
    assert engine._tiers is not None
    contents = [engine._tiers.host.content(piece) for piece in mine]
    assert engine.forget("s", "t").blocks == 8
    engine.check()
    assert not any(bool(content.any()) for content in contents)
    again = Talk(Answers(engine), "s", salt="t")
    assert again.run.cached[again.say(ids(1, 60), 4)] == 0


def test_nothing_but_the_path_itself_lies_in_a_tail() -> None:
    """A page that was given out anew still holds what stood there before, beyond what was written."""
    engine = tiny_engine(10, host_bytes=ROOM, debug_nan_fill=False)
    run = Answers(engine)
    for number in range(4):
        Talk(run, f"s{number}", salt="t").say(ids(number, 58), 1)
    tails = [piece for piece in host_pieces(engine) if piece.partial]
    assert tails
    assert engine._tiers is not None
    for piece in tails:
        content = engine._tiers.host.content(piece).view(-1, 8, 64)  # keys and values: slots of 16 float32
        assert bool(content[:, : piece.num_tokens].any())
        assert not bool(content[:, piece.num_tokens :].any())


def test_events_tell_the_tier() -> None:
    engine = evicted(kv_events=True).run.engine
    media = {event.medium for event in engine.kv_events() if isinstance(event, BlockStored)}
    assert media == {"GPU", "CPU"}


def test_a_tier_that_holds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the smallest piece takes"):
        tiny_engine(10, host_bytes=100)
    with pytest.raises(ValueError, match="prefix_reuse"):
        tiny_engine(10, host_bytes=ROOM, prefix_reuse=False)
    config = tiny_engine(10).config
    with pytest.raises(ValueError, match="at least 0"):
        dataclasses.replace(config, host_bytes=-1)


def block(talk: Talk, at: int) -> bytes:
    return array("I", talk.path[at * 8 : at * 8 + 8]).tobytes()
