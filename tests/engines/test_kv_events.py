"""KV events in the encodings that engines speak, and whatever else may come over such a socket."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kv_events import (
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEventsError,
    decode_batch,
    encode_batch,
)

pack = msgspec.msgpack.encode
IDS = [151644, 872, 198, 9064]
U32 = b"".join(token.to_bytes(4, "little") for token in IDS)
SHA = bytes(range(32))

# shaped as vLLM 0.26 sends it
VLLM_MAPS = [
    1789095808.8378847,
    [
        {
            "type": "BlockStored",
            "block_hashes": [15760518052499183552],
            "parent_block_hash": None,
            "token_ids": IDS,
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["tenant-a"]],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            "locality": "LOCAL",  # a later field
        },
        {"type": "BlockRemoved", "block_hashes": [SHA], "medium": "CPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ],
    3,
]
# vLLM 0.10 to 0.22: the same by place, what stands at the end and is not set left out
VLLM_ARRAYS = [
    12.5,
    [
        ["BlockStored", [-5, 7], 9, [*IDS, *IDS], 4, None, "GPU", "lora-7", [["lora-7"], ["lora-7"]]],
        ["BlockRemoved", [-5], "GPU"],
        ["AllBlocksCleared"],
    ],
    1,
]
# vLLM 0.9 and SGLang of its time: five fields, no rank
OLDEST = [12.5, [["BlockStored", [1], None, IDS, 4, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]]]
SGLANG_ARRAYS = [
    1.0,
    [
        ["BlockStored", [123], None, [7], 1, None, "CPU_TIER1", {"cache_salt": "tenant-a"}],
        ["BlockRemoved", [123], "GPU"],
    ],
    None,
]
SGLANG_MAPS = [
    1.0,
    [
        {
            "type": "BlockStored",
            "block_hashes": [123],
            "parent_block_hash": None,
            "token_ids": [7],
            "block_size": 1,
            "lora_id": None,
            "medium": "CPU_TIER1",
            "metadata": {"cache_salt": "tenant-a", "session_id": "s"},
        },
        {"type": "BlockRemoved", "block_hashes": [123], "medium": "GPU"},
    ],
    None,
]


def int64(value: int) -> bytes:
    return (value % (1 << 64)).to_bytes(8, "big")


def test_the_maps_of_vllm() -> None:
    batch = decode_batch(41, pack(VLLM_MAPS))
    name = int64(15760518052499183552)
    stored = BlockStored((name,), None, U32, 4, "GPU", None, (("tenant-a",),), 0, "full_attention")
    assert batch == EventBatch(41, 1789095808.8378847, 3, (stored, BlockRemoved((SHA,), "CPU", 0), AllBlocksCleared()))
    assert stored.spelled
    assert stored.salt == "tenant-a"
    assert list(stored.blocks()) == [(name, U32)]


def test_the_arrays_of_vllm_before_june_2026() -> None:
    batch = decode_batch(0, pack(VLLM_ARRAYS))
    stored, removed, cleared = batch.events
    assert stored == BlockStored(
        (int64(-5), int64(7)), int64(9), U32 * 2, 4, "GPU", "lora-7", (("lora-7",), ("lora-7",))
    )
    assert isinstance(stored, BlockStored)
    assert stored.salt == ""  # the adapter's name is no salt
    assert removed == BlockRemoved((int64(-5),), "GPU")
    assert cleared == AllBlocksCleared()
    assert batch.rank == 1


def test_the_oldest_form_names_no_rank_and_no_medium() -> None:
    batch = decode_batch(0, pack(OLDEST), rank=2)
    assert batch.events == (BlockStored((int64(1),), None, U32, 4), BlockRemoved((int64(1),)), AllBlocksCleared())
    assert batch.rank == 2


@pytest.mark.parametrize("told", [SGLANG_ARRAYS, SGLANG_MAPS])
def test_sglang_by_place_and_by_name_mean_the_same(told: Any) -> None:
    stored, removed = decode_batch(0, pack(told)).events
    assert stored == BlockStored((int64(123),), None, b"\7\0\0\0", 1, "CPU", None, (("tenant-a",),))
    assert isinstance(stored, BlockStored)
    assert stored.salt == "tenant-a"
    assert removed == BlockRemoved((int64(123),), "GPU")


def test_a_batch_as_a_map_is_read() -> None:
    told = {"ts": 1.5, "events": VLLM_MAPS[1], "data_parallel_rank": 3, "more": 1}
    assert decode_batch(7, pack(told)).events == decode_batch(7, pack(VLLM_MAPS)).events


def test_a_64_bit_name_is_the_same_signed_or_not() -> None:
    for form in (-1, (1 << 64) - 1):
        [event] = decode_batch(0, pack([0.0, [["BlockRemoved", [form]]], 0])).events
        assert event == BlockRemoved((b"\xff" * 8,))


def test_unknown_event_types_are_named_and_the_others_kept() -> None:
    told = [0.0, [{"type": "BlockMoved", "x": 1}, ["AllBlocksCleared"], ["BlockPinned", 3]], 0]
    assert decode_batch(0, pack(told)) == EventBatch(0, 0.0, 0, (AllBlocksCleared(),), ("BlockMoved", "BlockPinned"))


def test_a_copy_in_another_tier_may_tell_no_ids() -> None:
    [event] = decode_batch(0, pack([0.0, [["BlockStored", [1, 2], None, [], 16, None, "CPU"]], 0])).events
    assert isinstance(event, BlockStored)
    assert not event.spelled
    assert list(event.blocks()) == []


STORED = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": IDS, "block_size": 4}


@pytest.mark.parametrize(
    "told",
    [
        b"\xc1",
        b"",
        pack(3),
        pack([0.0]),
        pack(["now", [], 0]),
        pack([0.0, {}, 0]),
        pack([0.0, [], -1]),
        pack([0.0, [], "zero"]),
        pack([0.0, [3], 0]),
        pack([0.0, [[]], 0]),
        pack([0.0, [{"kind": "BlockStored"}], 0]),
        pack([0.0, [{"type": "x" * 2000}], 0]),
        pack([0.0, [{"type": "BlockStored"}], 0]),
        *(
            pack([0.0, [STORED | wrong], 0])
            for wrong in (
                {"block_hashes": None},
                {"block_hashes": [1.5]},
                {"block_hashes": [b""]},
                {"block_hashes": [bytes(65)]},
                {"parent_block_hash": "root"},
                {"token_ids": [-1]},
                {"token_ids": [1 << 32]},
                {"token_ids": [[1, 2]]},
                {"token_ids": b"abcd"},
                {"block_size": 0},
                {"block_size": 1 << 30},
                {"block_size": True},
                {"medium": 3},
                {"lora_name": 3},
                {"extra_keys": [None, None]},
                {"extra_keys": [[{}]]},
                {"extra_keys": [[[[[[[1]]]]]]]},
                {"group_idx": -1},
                {"metadata": {"cache_salt": 3}},
            )
        ),
        pack([0.0, [["BlockRemoved", "all"]], 0]),
        pack([0.0, [["AllBlocksCleared"]] * (MAX_EVENTS + 1), 0]),
        b"\x91" * 5000 + b"\xc0",
        b"\x81\x80\xc0",  # a map that is the key of a map
        b"\xd6\xff" + b"\xff" * 4,
        bytes(MAX_PAYLOAD_BYTES + 1),
    ],
)
def test_what_is_malformed_raises_one_typed_error(told: bytes) -> None:
    with pytest.raises(KvEventsError):
        decode_batch(0, told)


names = st.binary(min_size=1, max_size=64)
mediums = st.sampled_from([None, "GPU", "CPU", "STORAGE", "elsewhere"])
words = st.text(max_size=8)
keys = st.recursive(
    st.none() | words | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=8) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
).filter(lambda key: str(key).count("(") < 4)
groups = st.none() | st.integers(0, 5)


@st.composite
def stored_events(draw: st.DrawFn) -> BlockStored:
    hashes = tuple(draw(st.lists(names, max_size=4)))
    size = draw(st.integers(1, 4))
    count = draw(st.sampled_from([0, size * len(hashes)]))
    ids = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=count, max_size=count))
    entry = st.none() | st.lists(keys, max_size=2).map(tuple)
    extra = draw(st.lists(entry, min_size=len(hashes), max_size=len(hashes)).map(tuple) | st.just(()))
    spelled = b"".join(token.to_bytes(4, "little") for token in ids)
    parent, lora, kind = draw(st.none() | names), draw(st.none() | words), draw(st.none() | words)
    return BlockStored(hashes, parent, spelled, size, draw(mediums), lora, extra, draw(groups), kind)


removed_events = st.builds(BlockRemoved, st.lists(names, max_size=4).map(tuple), mediums, groups)
batches = st.builds(
    EventBatch,
    st.integers(0, 1 << 62),
    st.floats(0, 1e12),
    st.integers(0, 1000),
    st.lists(stored_events() | removed_events | st.builds(AllBlocksCleared), max_size=4).map(tuple),
)


@given(batches, st.sampled_from(["map", "array"]))
@settings(max_examples=150, deadline=None)
def test_what_is_encoded_is_decoded(batch: EventBatch, form: Any) -> None:
    assert decode_batch(batch.seq, encode_batch(batch, form=form)) == batch


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_raise_the_typed_error_at_most(payload: bytes) -> None:
    try:
        decode_batch(0, payload)
    except KvEventsError:
        return


@given(st.sampled_from([VLLM_MAPS, VLLM_ARRAYS, SGLANG_MAPS, OLDEST]), st.data())
@settings(max_examples=300, deadline=None)
def test_a_batch_with_some_bytes_changed_raises_the_typed_error_at_most(told: Any, data: st.DataObject) -> None:
    payload = bytearray(pack(told))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_batch(0, bytes(payload))
    except KvEventsError:
        return


@pytest.mark.parametrize("at", [float("nan"), float("inf"), float("-inf")])
def test_a_time_that_is_none_is_malformed(at: float) -> None:
    with pytest.raises(KvEventsError, match="time"):
        decode_batch(0, msgspec.msgpack.encode([at, [], 0]))
