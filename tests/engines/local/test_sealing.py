"""An engine that takes cached blocks to fewer bits: the same answers as far as the codec allows, and fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engines.contract import Base
from engines.local.engine import LocalEngine
from engines.local.kv.precision import POLICIES, Precision
from engines.local.kv.quant import METADATA, UNIT, Codec, Encoded, PlaneLayout
from engines.local.kv.sealer import turn_starts
from tests.engines.local.tiny import VOCAB, Answers, TinyModel, request, tiny_engine


@dataclass(frozen=True, slots=True)
class HalfPlane:
    """fp16 as a codec: so near that a wrong answer is the engine's fault."""

    turned: bool = False

    def layout(self, heads: int, dim: int) -> PlaneLayout:
        return PlaneLayout((UNIT, heads, 2 * dim), (1, heads, 1))

    def encode(self, x: Tensor) -> Encoded:
        meta = torch.zeros(len(x), 1, x.shape[2], 1, dtype=METADATA)
        return Encoded(x.half().view(torch.uint8), meta, meta)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> Tensor:
        return encoded.codes.view(torch.float16).to(dtype)


HALF = Codec("half", HalfPlane(), HalfPlane())


def halves(value_dim: int) -> Mapping[str, Codec]:
    return dict.fromkeys(("int8", "k8v4", "int4"), HALF)


def _engine(pages: int, policy: str, *, exact: bool = True, **settings: object) -> LocalEngine:
    made = tiny_engine(pages, kv_precision=policy, block_size=16, **settings)
    if exact:
        made = LocalEngine(made.model, made.config, made.clock, codecs=halves)
    return made


def _ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("policy", ["int8", "k8v4", "int4", "auto", "seed"])
def test_a_conversation_over_sealed_blocks_is_answered_as_over_full_ones(policy: str) -> None:
    """auto: by pressure; seed: never, in so short a window."""
    module = TinyModel()
    answers = Answers(_engine(40, policy))
    path: list[int] = []
    for turn in range(8):
        path += _ids(60, turn)
        answers.run(request(f"t{turn}", path, 12, session="s"))
        assert answers.ids[f"t{turn}"] == module.greedy(path, 12)
        if turn:
            assert answers.cached[f"t{turn}"] >= len(path) - 60 - 16
        path += answers.ids[f"t{turn}"]
    sealed = answers.engine.stats().sealed
    count = sum(sealed.values())
    assert count == {"seed": 0, "auto": count}.get(policy, (len(path) - UNIT) // UNIT - 1)
    assert (count > 2) == (policy != "seed")


def test_real_codecs_keep_the_tiny_models_answers() -> None:
    module = TinyModel()
    for policy in ("int8", "k8v4", "int4"):
        answers = Answers(_engine(40, policy, exact=False))
        path = _ids(400)
        answers.run(request("first", path, 4, session="s"))
        assert answers.engine.stats().sealed[policy] == 4
        path += answers.ids["first"]
        answers.run(request("then", path, 8, session="s"))
        assert answers.cached["then"] == len(path) - 1
        same = [a == b for a, b in zip(answers.ids["then"], module.greedy(path, 8), strict=True)]
        assert sum(same) >= (8 if policy == "int8" else 4)


def test_a_running_sequence_goes_on_while_its_own_blocks_are_sealed() -> None:
    module = TinyModel()
    answers = Answers(_engine(40, "int8"))
    prompt = _ids(300)
    answers.engine.submit(request("r", prompt, 100))
    while answers.engine.stats().sealed["int8"] < 3:
        answers.step()
    assert answers.engine.stats().running == 1
    answers.run()
    assert answers.ids["r"] == module.greedy(prompt, 100)


def test_two_sessions_share_sealed_blocks_and_a_branch_inside_one_is_computed_anew() -> None:
    module = TinyModel()
    answers = Answers(_engine(60, "int8"))
    shared = _ids(320)
    answers.run(request("a", shared, 4, session="a"))
    assert answers.engine.stats().sealed["int8"] == 3
    both = [shared + _ids(40, 7), shared[:150] + _ids(40, 8)]  # 150: inside a sealed unit and a sealed block
    answers.run(*(request(str(n), ids, 6, session=f"b{n}") for n, ids in enumerate(both)))
    assert [answers.cached["0"], answers.cached["1"]] == [320, 144]
    for n, ids in enumerate(both):
        assert answers.ids[str(n)] == module.greedy(ids, 6)


def test_a_request_that_wants_all_bits_computes_sealed_blocks_anew_and_keeps_its_own_full() -> None:
    answers = Answers(_engine(80, "int8"))
    path = _ids(320)
    answers.run(request("low", path, 4, session="s"))
    path += answers.ids["low"]
    choosy = replace(request("high", path, 4, session="t"), min_bits=16)
    answers.run(choosy)
    assert answers.cached["high"] == UNIT  # the first unit only
    answers.run(replace(request("again", [*path, 1], 4, session="t"), min_bits=16))
    assert answers.cached["again"] >= len(path) - 16
    assert answers.engine.stats().sealed["int8"] == 0  # what nobody used has gone for the same in full
    answers.run(replace(request("eight", [*path, 2], 4, session="u"), min_bits=8))
    assert answers.cached["eight"] >= len(path) - 16


def test_what_was_computed_on_few_bits_is_not_good_enough_for_who_wants_more() -> None:
    answers = Answers(_engine(80, "int4"))
    path = _ids(320)
    answers.run(request("first", path, 2, session="s"))
    path += [*answers.ids["first"], *_ids(40, 3)]
    answers.run(request("on", path, 2, session="s"))  # its 40 tokens attended to INT4
    pool, blocks = answers.engine._cache.pool, answers.engine._sessions.get("s", "")
    assert blocks is not None
    last = int(blocks.blocks.pages[-1])
    assert int(pool.units.bits[last]) == Precision.FULL
    assert int(pool.lineage[last]) == Precision.INT4


def test_the_system_prompt_stays_full_where_the_request_says_how_long_it_is() -> None:
    answers = Answers(_engine(60, "int8"))
    answers.run(replace(request("a", _ids(500), 2, session="s"), system_tokens=200))
    path = answers.engine._sessions.get("s", "")
    assert path is not None
    bits = answers.engine._cache.pool.bits(path.blocks.pages).tolist()
    assert bits == [16] * 16 + [8] * 8 + [16] * 7
    length, digest = list(path.marks.items())[-1]
    answers.run(request("b", _ids(100, 2), 2, session="s", base=Base(length, digest)))
    path = answers.engine._sessions.get("s", "")
    assert path is not None
    assert path.system_tokens == 200
    assert answers.engine._cache.pool.bits(path.blocks.pages).tolist()[:25] == [16] * 16 + [8] * 9


def test_the_last_turns_begin_where_the_request_says_and_else_where_answers_ended() -> None:
    answers = Answers(_engine(200, "auto", window=960, kv_int8_at=300, kv_int4_at=1000))
    answers.run(replace(request("a", _ids(600), 2, session="s"), recent_from=450))
    path = answers.engine._sessions.get("s", "")
    assert path is not None
    assert answers.engine._cache.pool.bits(path.blocks.pages).tolist()[:37] == [16] * 4 + [8] * 24 + [16] * 9
    answers.run(request("b", _ids(600, 2), 2, session="t"))  # one turn, as far as its marks say
    path = answers.engine._sessions.get("t", "")
    assert path is not None
    assert set(answers.engine._cache.pool.bits(path.blocks.pages).tolist()) == {16, 8}
    recent = 602 - 960 // 4  # of one long turn no more than a quarter of the window is recent
    assert answers.engine._cache.pool.bits(path.blocks.pages).tolist()[:37].count(8) == (recent // UNIT - 1) * 4


def test_an_answer_tells_the_fewest_bits_that_it_rests_on() -> None:
    answers = Answers(_engine(200, "auto", window=960, kv_int8_at=300, kv_int4_at=500))
    path = _ids(250)
    told = []
    for turn in range(4):
        answers.run(request(f"{turn}", path, 2, session="s"))
        told.append(answers.last[f"{turn}"].usage.prefix_bits)  # type: ignore[union-attr]
        path += [*answers.ids[f"{turn}"], *_ids(120, turn + 2)]
    assert told == [16, 8, 8, 4]  # the second grew past 300 tokens while it ran
    full = replace(request("full", path, 2, session="t"), min_bits=16)
    answers.run(full)
    assert answers.last["full"].usage.prefix_bits == 16  # type: ignore[union-attr]


@pytest.mark.prove
@pytest.mark.parametrize(("tokens", "wanted"), [(8_150, 16), (8_250, 8), (16_450, 4)])
def test_seed_goes_down_at_the_articles_lengths_in_the_running_engine(tokens: int, wanted: int) -> None:
    module = TinyModel()
    module.place = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0))
    engine = tiny_engine(1200, module=module, window=20_000, kv_precision="seed", block_size=16, max_batch_tokens=2048)
    engine.submit(replace(request("long", _ids(tokens), 1, session="s"), recent_from=tokens - 200))
    while engine.has_work():
        engine.step()
    engine.check()
    path = engine._sessions.get("s", "")
    assert path is not None
    bits = engine._cache.pool.bits(path.blocks.pages)
    assert set(bits[4:-20].tolist()) == {wanted}
    assert set(bits[:4].tolist()) | set(bits[-13:].tolist()) == {16}


def test_of_a_shared_system_prompt_the_blocks_are_pinned_and_no_more() -> None:
    answers = Answers(_engine(100, "full"))
    answers.run(replace(request("a", _ids(500), 2, session="s"), system_tokens=200, pinned=True))
    assert answers.engine.stats().blocks_pinned == 200 // 16


def test_more_sessions_are_held_than_there_are_full_pages_for_and_evicting_units_gives_room() -> None:
    module = TinyModel()
    answers = Answers(_engine(44, "int4", exact=False))
    paths = {}
    for n in range(12):
        paths[n] = _ids(256, n)
        answers.run(request(f"{n}", paths[n], 1, session=f"{n}"))
    stats = answers.engine.stats()
    assert 0 < stats.sealed_bytes <= stats.pool_bytes
    kept = sum(info.blocks == 17 or info.blocks == 16 for info in answers.engine.sessions())
    assert kept * 16 > 44  # full pages would hold two sessions
    assert stats.evictions > 0
    answers.run(request("long", _ids(600, 99), 8))
    assert answers.ids["long"] == module.greedy(_ids(600, 99), 8)


def test_a_forgotten_session_leaves_nothing_in_sealed_units() -> None:
    answers = Answers(_engine(40, "int8", exact=False))
    answers.run(request("a", _ids(320), 2, session="s"))
    engine = answers.engine
    assert engine.stats().sealed_bytes > 0
    engine.forget("s", "")
    engine.check()
    assert engine.stats().sealed_bytes == 0
    assert engine.stats().blocks_free == 40
    assert not any(bool(arena.bytes.any()) for arena in engine._runner._storage.arenas.values())


def test_a_preempted_sequence_comes_back_to_its_sealed_blocks() -> None:
    module = TinyModel()
    answers = Answers(_engine(31, "int8", watermark=0.0))
    prompts = [_ids(150, n) for n in range(3)]
    answers.run(*(request(str(n), ids, 80, session=str(n)) for n, ids in enumerate(prompts)))
    assert answers.engine.stats().preemptions > 0
    for n, ids in enumerate(prompts):
        assert answers.ids[str(n)] == module.greedy(ids, 80)


def test_turns_begin_where_answers_ended() -> None:
    assert turn_starts([100, 130, 180, 200, 260, 280], ended=True) == (0, 130, 200)
    assert turn_starts([100, 130, 180, 200, 260], ended=False) == (0, 130, 200)
    assert turn_starts([100, 130], ended=True) == (0,)
    assert turn_starts([100], ended=False) == (0,)


def test_a_policy_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_precision is 'int2'"):
        tiny_engine(8, kv_precision="int2")
    with pytest.raises(ValueError, match="block_size 24 must divide"):
        tiny_engine(8, kv_precision="int8", block_size=24)
    with pytest.raises(ValueError, match="prefix_reuse"):
        tiny_engine(8, kv_precision="int8", prefix_reuse=False)
    assert tiny_engine(8).stats().sealed == {}
    assert not POLICIES[tiny_engine(8).config.kv_precision].seals
