"""What is believed of a replica's cache, against a plain model of it; trust that sinks; memory that is bounded."""

from __future__ import annotations

from array import array
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    FeedReset,
    decode_batch,
    encode_batch,
)
from gateway.fleet.chain import CHUNK_TOKENS, extend, root
from gateway.fleet.residency import DEFAULT_TOKENS, MARGIN_TOKENS, NOTED_S, Held

MODEL = "m"
ROOT = root(salt="", model=MODEL)


def u32(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def keys_of(ids: list[int]) -> list[bytes]:
    return extend(ROOT, u32(ids))[1]


def live() -> Held:
    held = Held(MODEL)
    held.hear(FeedReset(None, "subscribed", whole=True), 0.0)
    return held


def batch(*events: BlockStored | BlockRemoved | AllBlocksCleared, at: float = 0.0, rank: int = 0) -> EventBatch:
    return decode_batch(0, encode_batch(EventBatch(0, at, rank, events)))


def stored(
    ids: list[int], block: int, *, parent: bytes | None = None, name: str = "b", medium: str = "GPU"
) -> BlockStored:
    names = tuple(f"{name}{n}".encode() for n in range(len(ids) // block))
    return BlockStored(names, parent, u32(ids[: len(names) * block]), block, medium)


@given(st.sampled_from([1, 4, 16, 24, 32, 64]), st.integers(1, 200))
def test_blocks_of_any_size_are_found_by_the_keys_of_their_ids(block: int, length: int) -> None:
    ids = list(range(1000, 1000 + length))
    held = live()
    held.hear(batch(stored(ids, block)), 0.0)
    told = length // block * block // CHUNK_TOKENS
    assert held.match(keys_of(ids), 0.0) == (told, float(told))


def test_blocks_that_come_one_by_one_go_on_from_their_parents() -> None:
    ids = list(range(96))
    held, parent = live(), None
    for place in range(3):
        event = stored(ids[32 * place : 32 * place + 32], 32, parent=parent, name=f"p{place}-")
        parent = event.hashes[-1]
        held.hear(batch(event), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 6


def test_what_was_removed_is_not_held_and_the_rest_is() -> None:
    ids = list(range(96))
    held = live()
    held.hear(batch(stored(ids, 32), BlockRemoved((b"b2",), "GPU")), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 4
    held.hear(batch(AllBlocksCleared()), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 0


def test_a_slower_tier_counts_less_and_the_fastest_of_several_counts() -> None:
    ids = list(range(32))
    held = live()
    held.hear(batch(stored(ids, 32)), 0.0)
    held.hear(batch(BlockStored((b"b0",), None, b"", 32, "CPU")), 0.0)
    assert held.match(keys_of(ids), 0.0) == (2, 2.0)
    held.hear(batch(BlockRemoved((b"b0",), "GPU")), 0.0)
    assert held.match(keys_of(ids), 0.0) == (2, 1.6)
    held.hear(batch(BlockRemoved((b"b0",), "CPU")), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 0


def test_a_rank_that_loses_its_cache_takes_nothing_from_the_others() -> None:
    both, own = list(range(64)), list(range(500, 564))
    for lost in (batch(AllBlocksCleared(), rank=1), FeedReset(1, "a gap")):
        held = live()
        held.hear(batch(stored(both, 32)), 0.0)
        held.hear(batch(stored(both, 32, name="x"), stored(own, 32, name="own"), rank=1), 0.0)
        assert [held.match(keys_of(ids), 0.0)[0] for ids in (both, own)] == [4, 4]
        held.hear(lost, 0.0)
        assert [held.match(keys_of(ids), 0.0)[0] for ids in (both, own)] == [4, 0]
        held.hear(batch(BlockRemoved((b"b1",), "GPU")), 0.0)
        assert held.match(keys_of(both), 0.0)[0] == 2
        held.hear(FeedReset(0, "the last one"), 0.0)
        assert (held.held_tokens, held.told.blocks, held.told.several, held.nodes) == (0, {}, {}, {})


def test_the_same_name_at_two_ranks_is_two_blocks_and_the_best_copy_counts() -> None:
    ids = list(range(32))
    held = live()
    held.hear(batch(stored(ids, 32, medium="CPU")), 0.0)
    held.hear(batch(stored(ids, 32), rank=3), 0.0)
    assert held.match(keys_of(ids), 0.0) == (2, 2.0)
    held.hear(batch(BlockRemoved((b"b0",), "GPU"), rank=3), 0.0)
    assert held.match(keys_of(ids), 0.0) == (2, 1.6)
    held.hear(batch(BlockRemoved((b"b0",), "CPU")), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 0


def test_of_a_model_with_several_kinds_of_attention_the_first_group_counts() -> None:
    ids = list(range(64))
    full = replace(stored(ids, 32), group=0, kind="full_attention")
    window = replace(stored(ids, 32), group=1, kind="sliding_window")
    held = live()
    assert held.hear(batch(full, window), 0.0) == 64  # computed once, whatever the number of groups
    held.hear(batch(BlockRemoved((b"b0",), "GPU", 1)), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 4
    held.hear(batch(BlockRemoved((b"b1",), "GPU", 0)), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 2
    other = live()
    other.hear(batch(window), 0.0)
    assert other.held_tokens == 0


def test_a_late_subscriber_does_not_credit_what_hangs_on_an_unknown_parent() -> None:
    held = live()
    held.hear(batch(stored(list(range(32)), 32, parent=b"never told")), 0.0)
    assert (held.told.unknown_parents, held.held_tokens) == (1, 0)


def test_salts_and_adapters_are_apart() -> None:
    ids = list(range(32))
    held = live()
    held.hear(batch(BlockStored((b"x",), None, u32(ids), 32, "GPU", extra_keys=(("salted",),))), 0.0)
    assert held.match(keys_of(ids), 0.0)[0] == 0
    assert held.match(extend(root(salt="salted", model=MODEL), u32(ids))[1], 0.0)[0] == 2


def test_what_we_noted_is_believed_until_a_live_feed_should_have_told_of_it() -> None:
    keys = keys_of(list(range(64)))
    held = live()
    held.note(ROOT.key, keys, 100.0)
    assert held.match(keys, 100.0 + NOTED_S)[0] == 4
    assert held.match(keys, 100.1 + NOTED_S)[0] == 0


def test_without_a_feed_notes_stay_until_the_replica_must_have_evicted_them() -> None:
    held = Held(MODEL, capacity_tokens=8 * CHUNK_TOKENS)
    paths = [keys_of([n] * 64) for n in range(3)]
    for at, keys in enumerate(paths):
        held.note(ROOT.key, keys, float(at))
    assert [held.match(keys, 1e6)[0] for keys in paths] == [0, 4, 4]


def test_a_session_that_grows_keeps_its_beginning_and_the_idle_one_goes() -> None:
    held = Held(MODEL, capacity_tokens=10 * CHUNK_TOKENS)
    old, idle = keys_of([1] * 64), keys_of([2] * 64)
    held.note(ROOT.key, old, 0.0)
    held.note(ROOT.key, idle, 1.0)
    end, _ = extend(ROOT, u32([1] * 64))
    grown = extend(end, u32([3] * 64))[1]
    held.note(end.key, grown, 2.0)
    assert held.match([*old, *grown], 3.0)[0] == 8
    assert held.match(idle, 3.0)[0] == 0


def test_the_loss_of_a_prompt_is_what_it_pushes_out_the_idle_first() -> None:
    held = Held(MODEL, capacity_tokens=8 * CHUNK_TOKENS)
    held.note(ROOT.key, keys_of([1] * 64), 0.0)
    assert held.expected_loss(64, 0.0) == 0.0
    assert held.expected_loss(128, 0.0) == 64.0
    held.note(ROOT.key, keys_of([2] * 64), 500.0)
    assert held.expected_loss(64, 500.0) < 1.0 < held.expected_loss(128, 500.0)


def test_a_replica_that_lies_loses_its_trust_within_three_turns() -> None:
    held = live()
    held.hear(batch(stored(list(range(320)), 32)), 0.0)
    assert held.trust == "exact"
    seen = []
    for _ in range(3):
        held.answered(predicted=320, reported=0, slack=32)
        seen.append(held.trust)
    assert seen == ["degraded", "guess", "guess"]
    assert held.match(keys_of(list(range(320))), 0.0)[0] == 0


def test_an_error_of_a_block_is_none_and_trust_comes_back() -> None:
    held = live()
    held.answered(predicted=320, reported=300, slack=32)
    assert (held.right, held.trust) == (1.0, "exact")
    held.answered(predicted=320, reported=160, slack=32)
    assert held.trust == "degraded"
    for _ in range(5):
        held.answered(predicted=320, reported=320, slack=32)
    assert held.trust == "exact"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 5), st.integers(1, 6)),
        st.tuples(st.just("remove"), st.integers(0, 5), st.integers(0, 6)),
        st.tuples(st.just("note"), st.integers(0, 5), st.integers(1, 6)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(STEPS)
def test_what_a_feed_told_is_what_the_replica_holds(steps: list[tuple[str, int, int]]) -> None:
    """Paths of up to six blocks; the model is the set of blocks that are held."""
    held, holds = live(), set[tuple[int, int]]()
    paths = {n: [n] * (32 * 6) for n in range(6)}

    def name(path: int, block: int) -> bytes:
        return f"{path}:{block}".encode()

    for what, path, count in steps:
        if what == "store":
            start = next((b for b in range(7) if (path, b) not in holds), 6)
            blocks = range(start, max(start, min(count, 6)))
            if blocks:
                parent = name(path, start - 1) if start else None
                ids = u32(paths[path][32 * start : 32 * blocks.stop])
                held.hear(batch(BlockStored(tuple(name(path, b) for b in blocks), parent, ids, 32, "GPU")), 0.0)
                holds |= {(path, b) for b in blocks}
        elif what == "remove":
            gone = [b for b in range(count, 6) if (path, b) in holds]
            held.hear(batch(BlockRemoved(tuple(name(path, b) for b in gone), "GPU")), 0.0)
            holds -= {(path, b) for b in gone}
        elif what == "note":
            held.note(ROOT.key, keys_of(paths[path][: 32 * count]), -1e9)  # long ago: it counts no more
        else:
            held.hear(batch(AllBlocksCleared()), 0.0)
            holds.clear()
        for number, ids in paths.items():
            expected = next((b for b in range(6) if (number, b) not in holds), 6)
            assert held.match(keys_of(ids), 0.0)[0] == 2 * expected
        assert held.held_tokens == 32 * len(holds)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=80))
def test_notes_never_take_more_than_the_replica_could_hold(told: list[tuple[int, int]]) -> None:
    held = Held(MODEL, capacity_tokens=20 * CHUNK_TOKENS)
    for at, (path, chunks) in enumerate(told):
        held.note(ROOT.key, keys_of([path] * (CHUNK_TOKENS * chunks)), float(at))
        assert len(held.nodes) <= 20
        in_runs = [key for run in _runs(held) for key in run.keys]
        assert sorted(in_runs) == sorted(held.nodes)
    for run in list(held.ends):
        assert run.children == 0


def _runs(held: Held) -> set[object]:
    runs = set()
    for end in held.ends:
        link = end
        while link is not None:
            runs.add(link)
            link = link.parent
    return runs


def test_a_replica_that_does_not_say_how_much_it_holds_is_bounded_all_the_same() -> None:
    assert Held(MODEL).capacity_tokens == DEFAULT_TOKENS


def test_what_is_believed_is_told_with_the_reason() -> None:
    held = Held(MODEL)
    assert (held.feed, held.trust) == ("none", "guess")
    held.hear(FeedReset(None, "subscribed", whole=True), 0.0)
    held.answered(predicted=320, reported=310, slack=32)
    held.answered(predicted=16, reported=0, slack=32)  # too little to be wrong about
    assert (held.feed, held.judged, held.came_true, held.last_reset) == ("live", 1, 1, "subscribed")
    for _ in range(3):
        held.answered(predicted=320, reported=0, slack=32)
    assert (held.feed, held.judged, held.came_true) == ("doubted", 4, 1)
    assert "less cached" in held.problem
    held.hear(FeedReset(None, "heard anew"), 0.0)
    held.live = False
    assert (held.feed, held.problem) == ("silent", "")


def test_blocks_that_end_no_chunk_are_bounded_too() -> None:
    held = live()
    held.capacity_tokens = 1024
    for number in range(10_000):
        name = number.to_bytes(4, "big")
        held.hear(batch(BlockStored((name,), None, u32([7]), 1)), 0.0)
        if not held.live:
            break
    assert not held.live
    assert not held.told.blocks
    assert number * CHUNK_TOKENS <= 2 * 1024 + MARGIN_TOKENS


def test_tiers_of_names_that_nobody_knows_are_one() -> None:
    held = live()
    held.hear(batch(BlockStored((b"a",), None, u32([7] * 16), 16)), 0.0)
    for number in range(100):
        held.hear(batch(BlockStored((b"a",), None, b"", 16, f"tier {number}")), 0.0)
    assert len(held.told.blocks[b"a"].media) == 2
    held.hear(batch(BlockRemoved((b"a",), "GPU")), 0.0)
    assert set(held.told.credits.values()) == {0.5}
    held.hear(batch(BlockRemoved((b"a",), "tier 7")), 0.0)
    assert not held.told.blocks
