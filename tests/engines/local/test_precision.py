"""Which unit keeps how many bits, over all paths: what is protected stays full, and more pressure never adds bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.local.kv.precision import (
    POLICIES,
    SEALED,
    PathShape,
    Precision,
    PrecisionPolicy,
    allowed,
    good_prefix,
    lineage,
    policy_named,
    targets,
)
from engines.local.kv.quant import UNIT, codecs

FULL, INT8, K8V4, INT4 = Precision.FULL, Precision.INT8, Precision.K8V4, Precision.INT4


@st.composite
def shapes(draw: st.DrawFn) -> PathShape:
    tokens = draw(st.integers(0, 6_000))
    starts = sorted(draw(st.sets(st.integers(0, tokens), max_size=8)))
    return PathShape(tokens, draw(st.integers(0, 600)), tuple(starts), draw(st.sampled_from([0, 0, 4, 5, 6, 8, 9, 16])))


policies = st.sampled_from(list(POLICIES.values()))
windows = st.sampled_from([1024, 8192])
pressures = st.floats(0, 1)
usable = st.sets(st.sampled_from(SEALED))


@settings(max_examples=50, deadline=None)
@given(path=shapes(), policy=policies, window=windows, pressure=pressures, usable=usable)
def test_what_is_protected_stays_full_and_nothing_is_worse_than_asked(
    path: PathShape, policy: PrecisionPolicy, window: int, pressure: float, usable: set[Precision]
) -> None:
    units = targets(path, policy, window=window, pressure=pressure, usable=usable)
    assert len(units) == path.num_tokens // UNIT
    for unit, precision in enumerate(units):
        start, stop = unit * UNIT, (unit + 1) * UNIT
        assert precision in usable | {FULL}
        assert precision >= min(path.min_bits, FULL)
        assert precision == FULL or (start >= max(path.system_tokens, 4) and stop <= path.num_tokens - UNIT)
        if policy.recent_turns and (turns := path.turn_starts[-policy.recent_turns :]):
            recent = max(turns[0], path.num_tokens - policy.recent_share * window)
            assert precision == FULL or start < recent


@settings(max_examples=30, deadline=None)
@given(path=shapes(), policy=policies, window=windows, one=pressures, other=pressures)
def test_more_pressure_never_adds_bits_and_older_units_never_have_more(
    path: PathShape, policy: PrecisionPolicy, window: int, one: float, other: float
) -> None:
    low, high = (targets(path, policy, window=window, pressure=p) for p in sorted((one, other)))
    assert all(more >= less for more, less in zip(low, high, strict=True))
    older = [precision for unit, precision in enumerate(low) if unit * UNIT >= max(path.system_tokens, 4)]
    assert older == sorted(older)


def _at(name: str, tokens: int, *, window: int = 32_768, pressure: float = 0.0) -> list[Precision]:
    starts = tuple(range(0, tokens, 200))
    return targets(PathShape(tokens, 100, starts), POLICIES[name], window=window, pressure=pressure)


def test_full_keeps_everything_at_any_pressure() -> None:
    assert set(_at("full", 30_000, pressure=1.0)) == {FULL}
    assert [name for name, policy in POLICIES.items() if not policy.seals] == ["full"]


@pytest.mark.parametrize(("tokens", "wanted"), [(8_191, FULL), (8_192, INT8), (16_383, INT8), (16_384, INT4)])
def test_auto_goes_down_at_a_quarter_and_at_a_half_of_the_window(tokens: int, wanted: Precision) -> None:
    units = _at("auto", tokens)
    assert set(units[2:-12]) == {wanted}
    assert set(units[:2]) | set(units[-9:]) == {FULL}  # system prompt; the last three turns of 200 tokens


def test_other_lengths_may_be_asked_for_in_tokens_or_as_a_share() -> None:
    policy = policy_named("auto", 1_000, 0.75)
    for tokens, wanted in ((999, FULL), (1_000, INT8), (3_071, INT8), (3_072, INT4)):
        assert targets(PathShape(tokens), policy, window=4_096, pressure=0.0)[1] == wanted
    assert policy_named("seed", int4_at=9_000).long[0] == POLICIES["seed"].long[0]
    for name in ("full", "int8"):
        with pytest.raises(ValueError, match="are of the policies auto and seed"):
            policy_named(name, int8_at=0.5)


@pytest.mark.parametrize(("pressure", "wanted"), [(0.49, FULL), (0.5, INT8), (0.75, K8V4), (0.9, INT4)])
def test_auto_goes_down_with_pressure(pressure: float, wanted: Precision) -> None:
    units = _at("auto", 4_000, pressure=pressure)
    assert set(units[2:53]) == {wanted}
    assert set(units[:2]) | set(units[-9:]) == {FULL}  # system prompt; the last three turns of 200 tokens


@pytest.mark.parametrize(("tokens", "wanted"), [(8_191, FULL), (8_192, INT8), (16_383, INT8), (16_384, INT4)])
def test_seed_goes_down_at_the_articles_lengths(tokens: int, wanted: Precision) -> None:
    units = _at("seed", tokens, window=4_096)
    assert set(units[2:-12]) == {wanted}
    assert set(units[-9:]) == {FULL}


@pytest.mark.parametrize("precision", SEALED)
def test_a_fixed_policy_leaves_the_first_unit_and_the_tail(precision: Precision) -> None:
    units = targets(PathShape(1_000), POLICIES[precision.codec], window=8_192, pressure=0.0)
    assert units == [FULL, *[precision] * 13, FULL]


def test_turns_longer_than_a_quarter_of_the_window_are_not_recent_throughout() -> None:
    path = PathShape(8_000, turn_starts=(0, 7_900))
    units = targets(path, POLICIES["auto"], window=8_192, pressure=0.6)
    assert units.count(FULL) == 1 + 2048 // UNIT


@settings(max_examples=50, deadline=None)
@given(wanted=st.sampled_from(list(Precision)), min_bits=st.integers(0, 32), usable=usable)
def test_a_precision_that_may_not_be_is_replaced_by_the_next_better(
    wanted: Precision, min_bits: int, usable: set[Precision]
) -> None:
    got = allowed(wanted, min_bits, usable)
    between = [one for one in usable if wanted <= one < got and one >= min_bits]
    assert got in usable | {FULL}
    assert got >= wanted
    assert not between


bits = st.sampled_from([4, 6, 8, 16])


@settings(max_examples=50, deadline=None)
@given(blocks=st.lists(st.tuples(bits, bits), max_size=12), min_bits=st.sampled_from([0, 4, 6, 8, 16, 32]))
def test_a_block_is_as_good_as_the_worst_that_went_into_it(blocks: list[tuple[int, int]], min_bits: int) -> None:
    own, lineages = (np.array([block[i] for block in blocks], np.int8) for i in (0, 1))
    count = good_prefix(own, lineages, min_bits)
    good = [min(block) >= min(min_bits, 16) for block in blocks]
    assert all(good[:count])
    assert count == len(blocks) or not good[count]
    assert lineage(8, own, lineages) == min([8, *(bit for block in blocks for bit in block)])


def test_every_precision_below_full_has_a_codec() -> None:
    assert {precision.codec for precision in SEALED} == set(codecs(64))
