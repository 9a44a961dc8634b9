"""KV shift: kept K/V taken to another position. What is exact stays exact, what is not is never anybody else's.

A random model of four layers (float32); every step runs the engine's own check of all invariants.
"""

from __future__ import annotations

import random
import time
from array import array
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.contract import EMPTY_DIGEST, Base, RequestRefused, Shift, chain_digest
from engines.local.config import EngineConfig
from engines.local.engine import CoreRequest, LocalEngine
from engines.local.model import LoadedModel, adopt
from tests.engines.local.test_families import FAMILIES, PLAIN_HEADS, build
from tests.engines.local.tiny import Answers, request

PAGE = 8
HEAD, MIDDLE, KEPT, SUMMARY, TAIL = 20, 30, 40, 13, 9  # tokens
SOURCE, DEST = HEAD + MIDDLE, HEAD + SUMMARY
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
SHIFTING: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{name: FAMILIES[name] for name in ("llama", "llama3 rope", "qwen3", "smollm3")},
    "yarn": ("llama", {"rope_parameters": YARN}, ()),
    "neighbours": ("cohere", {}, ()),
    "neighbours of a part": ("glm4", {}, ()),
    "halves of a part": ("gpt_neox", {}, PLAIN_HEADS),
}


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=count)


def loaded(name: str = "llama") -> LoadedModel:
    return adopt(build(*SHIFTING[name]), name=name, decode=lambda ids: "")


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded()


def make_engine(model: LoadedModel, pages: int = 64, **settings: Any) -> LocalEngine:
    values = {
        "block_size": PAGE,
        "max_batch_tokens": 24,
        "max_running": 4,
        "debug_nan_fill": True,
        "seed": 1,
    } | settings
    return LocalEngine(
        model, EngineConfig(pool_bytes=(pages + 1) * PAGE * model.kv_bytes_per_token, **values), time.monotonic
    )


class Talk:
    """A session that was cut: its old path is kept, and `prompt` is what follows the cut."""

    def __init__(self, engine: LocalEngine, *, summary: list[int] | None = None) -> None:
        self.run = Answers(engine)
        self.engine = engine
        head, kept = ids(1, HEAD), ids(3, KEPT)
        old = [*head, *ids(2, MIDDLE), *kept]
        self.run.run(request("old", old, 6, session="s"))
        answer = self.run.ids["old"]
        digest = EMPTY_DIGEST
        for part in (old, answer):
            digest = chain_digest(digest, array("I", part).tobytes())
        self.base = Base(len(old) + len(answer), digest)
        self.kept = [*kept, *answer]
        self.prompt = [*head, *(ids(4, SUMMARY) if summary is None else summary), *self.kept, *ids(5, TAIL)]

    def shift(self, recompute: int = 0, **changes: Any) -> Shift:
        return replace(Shift(self.base, SOURCE, DEST, len(self.kept), recompute), **changes)

    def new(self, shift: Shift | None = None, **changes: Any) -> CoreRequest:
        return replace(self.plain(), **({"shift": self.shift() if shift is None else shift} | changes))

    def plain(self) -> CoreRequest:
        return request("new", self.prompt, 5, session="s")

    def prefilled(self, request_id: str = "new") -> None:
        while not self.run.ids.get(request_id):
            self.run.step()

    def shifted(self) -> int:
        usage = self.run.last["new"].usage
        assert usage is not None
        assert usage.approximate == (usage.shifted_tokens > 0)
        return usage.shifted_tokens


def kv_of(engine: LocalEngine, request_id: str, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, kv_heads, dim] of a running request at positions start ... stop, from its pages."""
    seq = engine._live[request_id].seq
    assert seq.written >= stop
    places = torch.arange(start, stop)
    slots = torch.tensor(seq.table)[places // PAGE] * PAGE + places % PAGE
    storage = engine._runner._storage
    return storage.key_slots[layer][slots], storage.value_slots[layer][slots]


def exactly(model: LoadedModel, prompt: list[int], count: int = 5) -> list[int]:
    return Answers(make_engine(model)).run(request("exact", prompt, count)).ids["exact"]


def both(model: LoadedModel, recompute: int) -> tuple[Talk, Talk]:
    """The same prompt prefilled with a shift, and without, up to the first generated token."""
    with_shift, without = Talk(make_engine(model)), Talk(make_engine(model))
    with_shift.engine.submit(with_shift.new(with_shift.shift(recompute)))
    without.engine.submit(without.plain())
    for talk in (with_shift, without):
        talk.prefilled()
    return with_shift, without


# the last generated id is on the path but was never written: 45 of the 46 kept tokens can be copied
COPIED = KEPT + 5


@pytest.mark.parametrize("name", SHIFTING)
def test_shifted_keys_and_values_of_the_first_layer_are_the_exact_ones(name: str) -> None:
    """Layer 0 sees tokens and positions only, so there the way from one position to the other must be exact."""
    model = loaded(name)
    with_shift, without = both(model, recompute=0)
    stop = DEST + COPIED
    for one, other in zip(
        kv_of(with_shift.engine, "new", 0, DEST, stop), kv_of(without.engine, "new", 0, DEST, stop), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    deep = [kv_of(talk.engine, "new", 3, DEST, stop)[0] for talk in (with_shift, without)]
    assert float((deep[0] - deep[1]).norm() / deep[1].norm()) > 0.01  # and it is approximate further up


def test_what_is_recomputed_is_exact_in_every_layer_and_what_follows_is_not(llama: LoadedModel) -> None:
    with_shift, without = both(llama, recompute=16)
    for layer in range(4):
        for one, other in zip(
            kv_of(with_shift.engine, "new", layer, 0, DEST + 16),
            kv_of(without.engine, "new", layer, 0, DEST + 16),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    after = [kv_of(talk.engine, "new", 2, DEST + COPIED, len(talk.prompt))[1] for talk in (with_shift, without)]
    assert float((after[0] - after[1]).abs().max()) > 1e-4


def test_a_shift_by_no_position_copies_bit_by_bit(llama: LoadedModel) -> None:
    talk = Talk(make_engine(llama), summary=ids(9, MIDDLE))  # another text of the same length: the kept turns stay
    path = talk.engine._sessions.get("s", "")
    assert path is not None
    storage = talk.engine._runner._storage
    first = SOURCE // PAGE + 1
    pages = torch.tensor(path.blocks.pages[first:].astype("int64"))
    before = {layer: storage.keys[layer][pages].clone() for layer in range(4)}
    talk.engine.submit(talk.new(talk.shift(dest_start=SOURCE)))
    talk.prefilled()
    for layer in range(4):
        keys, _ = kv_of(talk.engine, "new", layer, first * PAGE, (first + len(pages)) * PAGE)
        assert torch.equal(keys, before[layer].flatten(0, 1))
    assert talk.engine._live["new"].seq.shifted_tokens == COPIED


@pytest.mark.parametrize("recompute", [0, 5, 16, 44])
def test_the_answer_tells_how_many_tokens_were_shifted_and_only_the_rest_is_computed(
    llama: LoadedModel, recompute: int
) -> None:
    talk = Talk(make_engine(llama))
    before = talk.engine.stats().prefill_tokens
    talk.run.run(talk.new(talk.shift(recompute)))
    assert talk.shifted() == COPIED - recompute
    assert talk.run.cached["new"] == HEAD // PAGE * PAGE + HEAD % PAGE  # the common beginning, copied amid a block
    computed = talk.engine.stats().prefill_tokens - before
    assert computed == len(talk.prompt) - HEAD - (COPIED - recompute)
    assert talk.engine.stats().shifted_tokens == COPIED - recompute


def test_nobody_gets_what_a_shift_made(llama: LoadedModel) -> None:
    talk = Talk(make_engine(llama))
    talk.run.run(talk.new(talk.shift(16)))
    exact_until = DEST + 16
    answer = exactly(llama, talk.prompt)
    talk.run.run(request("other", talk.prompt, 5))
    assert talk.run.ids["other"] == answer
    assert talk.run.cached["other"] == exact_until // PAGE * PAGE
    path = [*talk.prompt, *talk.run.ids["new"]]
    digest = EMPTY_DIGEST
    for part in (talk.prompt, talk.run.ids["new"]):
        digest = chain_digest(digest, array("I", part).tobytes())
    fresh = Talk(make_engine(llama))
    fresh.run.run(fresh.new(fresh.shift(16)))
    following = request("next", ids(7, 4), 5, base=Base(len(path), digest), session="s")
    fresh.run.run(following)
    assert fresh.run.ids["next"] == exactly(llama, path + ids(7, 4))
    assert fresh.run.cached["next"] == exact_until
    assert talk.engine.stats().blocks_used == 0


def test_what_is_prefilled_in_the_background_afterwards_replaces_the_approximate_part(llama: LoadedModel) -> None:
    talk = Talk(make_engine(llama))
    talk.run.run(talk.new())
    path = [*talk.prompt, *talk.run.ids["new"]]
    talk.run.run(request("idle", path, 1, session="s", priority=10))
    talk.run.run(request("next", path + ids(7, 9), 5, session="s"))
    assert talk.run.cached["next"] == (len(path) - 1) // PAGE * PAGE
    assert talk.run.ids["next"] == exactly(llama, path + ids(7, 9))


def unknown_base(talk: Talk) -> CoreRequest:
    return talk.new(talk.shift(base=Base(talk.base.length, b"x" * 32)))


def forgotten(talk: Talk) -> CoreRequest:
    talk.engine.forget("s", "")
    return talk.new()


def under_another_salt(talk: Talk) -> CoreRequest:
    return talk.new(salt="other tenant")


def evicted(talk: Talk) -> CoreRequest:
    talk.run.run(request("big", ids(8, 64 * PAGE - 5), 1))
    return talk.new()


def prefilled_already(talk: Talk) -> CoreRequest:
    talk.run.run(request("exact prefix", [*talk.prompt, 3], 1))
    return talk.new()


@pytest.mark.parametrize("case", [unknown_base, forgotten, under_another_salt, evicted, prefilled_already])
def test_without_what_it_would_copy_or_with_something_better_the_answer_is_exact(llama: LoadedModel, case: Any) -> None:
    talk = Talk(make_engine(llama))
    talk.run.run(case(talk))
    assert talk.shifted() == 0
    assert talk.run.ids["new"] == exactly(llama, talk.prompt)


def test_where_a_source_page_has_gone_what_lies_before_it_is_copied(llama: LoadedModel) -> None:
    talk = Talk(make_engine(llama))
    path = talk.engine._sessions.get("s", "")
    assert path is not None
    lost = SOURCE // PAGE + 2
    pool = talk.engine._cache.pool
    pool.unname(int(path.blocks.pages[lost]))
    talk.engine._cache.index.drop(int(path.blocks.uids[lost]))
    talk.run.run(talk.new())
    assert talk.shifted() == lost * PAGE - SOURCE


@pytest.mark.parametrize(("pages", "shifted"), [(14, 0), (20, COPIED)])
def test_a_small_pool_gives_up_the_shift_and_not_the_request(llama: LoadedModel, pages: int, shifted: int) -> None:
    """9 pages are new; 3 of the common beginning and 6 of the source must stay while they are given out."""
    talk = Talk(make_engine(llama, pages=pages))
    talk.run.run(talk.new())
    assert talk.shifted() == shifted
    if not shifted:
        assert talk.run.ids["new"] == exactly(llama, talk.prompt)


def test_a_preempted_shift_is_copied_again(llama: LoadedModel) -> None:
    talk = Talk(make_engine(llama))
    low = replace(talk.new(), priority=5)
    talk.engine.submit(low)
    talk.prefilled()
    talk.engine._scheduler.preempt(talk.engine._live["new"].seq)
    talk.engine.check()
    while talk.engine.has_work():
        talk.run.step()
    assert talk.shifted() == COPIED
    again = Talk(make_engine(llama))
    again.run.run(again.new())
    assert talk.run.ids["new"] == again.run.ids["new"]


def test_nobody_waits_for_a_block_that_a_shift_will_not_publish(llama: LoadedModel) -> None:
    talk = Talk(make_engine(llama, max_batch_tokens=64))
    talk.engine.submit(talk.new(talk.shift(16)))
    talk.engine.submit(request("other", talk.prompt, 5))
    talk.run.step()  # the exact part is computed once: the other waits for it
    assert "other" not in talk.run.cached
    talk.run.step()
    assert talk.run.cached["other"] == (DEST + 16) // PAGE * PAGE
    while talk.engine.has_work():
        talk.run.step()
    assert talk.run.ids["other"] == exactly(llama, talk.prompt)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"length": 47}, "of a base of"),
        ({"source_start": SOURCE + 1}, "of a base of"),
        ({"dest_start": DEST + 10}, "of a prompt of"),
        ({"source_start": SOURCE - 1}, "are not those"),
        ({"dest_start": DEST - 1}, "are not those"),
        ({"length": 0}, "at least one token"),
        ({"recompute": -1}, "no negative"),
    ],
)
def test_a_shift_that_cannot_be_meant_is_refused(llama: LoadedModel, changes: dict[str, int], says: str) -> None:
    talk = Talk(make_engine(llama))
    with pytest.raises(RequestRefused, match=says):
        talk.engine.submit(talk.new(talk.shift(**changes)))
    with pytest.raises(RequestRefused, match="needs the session"):
        talk.engine.submit(talk.new(session=None))
    assert not talk.engine.has_work()


def test_a_shift_up_to_the_prompts_end_leaves_its_last_token_to_run(llama: LoadedModel) -> None:
    talk = Talk(make_engine(llama))
    del talk.prompt[-TAIL:]
    talk.run.run(talk.new())
    assert talk.shifted() == COPIED
    assert len(talk.run.ids["new"]) == 5


@pytest.mark.parametrize("seed", range(6))
def test_shifts_among_other_requests_leave_everybody_elses_answer_as_it_is(llama: LoadedModel, seed: int) -> None:
    draw = random.Random(seed)
    talk = Talk(make_engine(llama, pages=draw.choice([18, 24, 40])))
    asked: dict[str, list[int]] = {}
    talk.engine.submit(talk.new(talk.shift(draw.choice([0, 7, 16]))))
    for number in range(6):
        for _ in range(draw.randint(0, 3)):
            talk.run.step()
        name = f"r{number}"
        asked[name] = [*talk.prompt[: draw.choice([0, 24, 50, len(talk.prompt)])], *ids(100 * seed + number, 5)]
        talk.engine.submit(request(name, asked[name], 3, priority=draw.choice([-1, 0, 3])))
    while talk.engine.has_work():
        talk.run.step()
    assert {name: talk.run.ids[name] for name in asked} == {
        name: exactly(llama, prompt, 3) for name, prompt in asked.items()
    }
    assert talk.engine.stats().blocks_used == 0
