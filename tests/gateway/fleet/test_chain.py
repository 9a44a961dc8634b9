"""Keys of token paths: the same whatever the pieces, different whatever differs."""

from __future__ import annotations

from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.chain import CHUNK_TOKENS, MARKS_TO, Chain, extend, root

ROOT = root(salt="s", model="m")
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def u32(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


@given(st.lists(IDS, max_size=6))
def test_a_path_has_the_same_keys_in_whatever_pieces_it_comes(pieces: list[list[int]]) -> None:
    at, keys = ROOT, []
    for piece in pieces:
        at, made = extend(at, u32(piece))
        keys += made
    ids = [id for piece in pieces for id in piece]
    assert (at, keys) == extend(ROOT, u32(ids))
    assert (at.num_tokens, len(keys)) == (len(ids), len(ids) // CHUNK_TOKENS)
    assert Chain.of_text(at.as_text()) == at


@given(st.lists(st.integers(0, 200), max_size=4))
def test_a_path_remembers_its_beginning_in_steps_of_an_eighth(lengths: list[int]) -> None:
    at, keys = ROOT, []
    for length in lengths:
        at, made = extend(at, bytes(4 * CHUNK_TOKENS * length))
        keys += made
    marks = at.remembered()
    assert all(keys[chunks - 1] == key for chunks, key in marks)
    places = [0, *reversed([chunks for chunks, _ in marks]), min(len(keys), MARKS_TO) + 1]
    assert all(b - a <= max(1, a / 8 + 1) for a, b in pairwise(places))
    assert len(at.first) <= 40


@given(st.lists(st.integers(0, 2**32 - 1), min_size=CHUNK_TOKENS, max_size=100), st.data())
def test_one_other_id_changes_every_key_from_its_chunk_on(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) // CHUNK_TOKENS * CHUNK_TOKENS - 1))
    other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    keys, others = extend(ROOT, u32(ids))[1], extend(ROOT, u32(other))[1]
    chunk = at // CHUNK_TOKENS
    assert keys[:chunk] == others[:chunk]
    assert not set(keys[chunk:]) & set(others[chunk:])


@given(st.lists(st.integers(0, 900), min_size=1, max_size=12))
def test_a_path_remembers_where_its_last_turns_ended_to_a_block_of_64_tokens(lengths: list[int]) -> None:
    at, ends = ROOT, []
    for length in lengths:
        at, _ = extend(at, bytes(4 * length))
        at = at.ended()
        assert Chain.of_text(at.as_text()) == at
        ends.append(at.chunks)
    keys = extend(ROOT, bytes(4 * sum(lengths)))[1]
    assert all(keys[chunks - 1] == key for chunks, key in at.remembered())
    known = {chunks for chunks, _ in at.remembered()}
    assert {chunks - chunks % 4 for chunks in ends[-8:]} - {0} <= known | {0}
    assert len(at.as_text()) < 2000


def test_fields_of_the_root_cannot_pass_for_one_another() -> None:
    roots = {root(salt=salt, model=model).key for salt, model in [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "")]}
    roots.add(root(salt="", model="a", adapter="bc").key)
    assert len(roots) == 5
