"""What a pool did, as events: the net of it, and what adds up from it."""

from hypothesis import given
from hypothesis import strategies as st

from engines.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from engines.kv_log import MAX_RUN, Block, KvLog
from engines.kv_stream import MAX_PART, ResidentBlocks


def block(number: int, parent: int | None = None, salt: str = "") -> Block:
    name = b"n%d" % number
    return Block(name, None if parent is None else b"n%d" % parent, number.to_bytes(4, "little"), salt)


def test_blocks_that_follow_one_another_are_one_event_and_the_salt_stands_with_the_first() -> None:
    log = KvLog(1)
    for one in (block(1, salt="s"), block(2, 1), block(3, 2), block(9, 5), block(10)):
        log.stored(one)
    events = log.drain()
    assert events == (
        BlockStored((b"n1", b"n2", b"n3"), None, b"\1\0\0\0\2\0\0\0\3\0\0\0", 1, "GPU", None, (("s",), None, None)),
        BlockStored((b"n9",), b"n5", b"\x09\0\0\0", 1, "GPU"),
        BlockStored((b"n10",), None, b"\x0a\0\0\0", 1, "GPU"),
    )
    assert log.drain() == ()


def test_what_comes_and_goes_between_two_drains_is_not_told() -> None:
    log = KvLog(1)
    log.stored(block(1))
    log.removed(b"n1")
    assert log.drain() == ()
    log.stored(block(1))
    assert len(log.drain()) == 1
    log.removed(b"n1")
    log.stored(block(1))  # as when its content moves to another page
    assert log.drain() == ()


def test_events_are_of_bounded_length() -> None:
    log = KvLog(1)
    for number in range(MAX_RUN + 1):
        log.stored(block(number, number - 1 if number else None))
    assert [len(event.hashes) for event in log.drain() if isinstance(event, BlockStored)] == [MAX_RUN, 1]
    for number in range(MAX_RUN + 1):
        log.removed(b"n%d" % number)
    assert [len(event.hashes) for event in log.drain() if isinstance(event, BlockRemoved)] == [MAX_RUN, 1]


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans())))
def test_what_is_drained_adds_up_to_what_is_there(steps: list[tuple[int, bool]]) -> None:
    """A tree of eight blocks, each the child of its half."""
    log, resident, there = KvLog(1), ResidentBlocks(), set[bytes]()
    for number, drained in steps:
        one = block(number, number // 2 if number > 1 else None)
        if one.name in there:
            there.discard(one.name)
            log.removed(one.name)
        else:
            there.add(one.name)
            log.stored(one)
        if drained:
            for event in log.drain():
                resident.apply(event)
            assert {name for name in map(b"n%d".__mod__, range(8)) if name in resident} == there


@given(st.sets(st.integers(0, 40)))
def test_a_snapshot_tells_parents_first_and_adds_up_to_the_same(numbers: set[int]) -> None:
    resident, again = ResidentBlocks(), ResidentBlocks()
    log = KvLog(1)
    for number in sorted(numbers, reverse=True):  # children first, as when a parent was removed and came again
        log.stored(block(number, number // 2 if number > 1 else None, "" if number > 1 else "salt"))
    for event in log.drain():
        resident.apply(event)
    told = list(resident.stored())
    seen: set[bytes] = set()
    for event in told:
        assert event.parent is None or event.parent in seen or event.parent not in resident
        assert event.salt == ("salt" if event.hashes[0] in (b"n0", b"n1") else "")
        seen.update(event.hashes)
        again.apply(event)
    assert len(again) == len(numbers)
    assert again.tier("GPU") == resident.tier("GPU")


def test_a_snapshot_comes_in_parts_of_bounded_size() -> None:
    log, resident = KvLog(1), ResidentBlocks()
    for number in range(2 * MAX_PART + 3):
        log.stored(block(number, number - 1 if number else None))
    for event in log.drain():
        resident.apply(event)
    assert [len(event.hashes) for event in resident.stored()] == [MAX_PART, MAX_PART, 3]
    resident.apply(AllBlocksCleared())
    assert list(resident.parts()) == [()]
    for number in range(MAX_PART + 1):
        resident.apply(BlockStored((b"r%d" % number,), None, bytes(4), 1))
    assert [len(part) for part in resident.parts()] == [MAX_PART, 1]


def test_all_clear_leaves_nothing() -> None:
    resident = ResidentBlocks()
    resident.apply(BlockStored((b"a",), None, bytes(4), 1))
    resident.apply(AllBlocksCleared())
    assert len(resident) == 0
    assert list(resident.stored()) == []
