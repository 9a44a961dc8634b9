"""Background work (priority above 0) that no foreground request feels, on the tiny model whose right answers are known.

Every step of every test runs the engine's own check of all invariants (tests/engines/local/tiny.py, Answers.step).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engines.contract import EMPTY_DIGEST, Base, EngineOverloaded, chain_digest
from engines.local.engine import LocalEngine
from engines.local.scheduler import Row
from tests.engines.local.tiny import VOCAB, Answers, TinyModel, request, tiny_engine

TINY = TinyModel()
CHUNK = 8
LOW = 5


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


class Watched(Answers):
    """Answers that also remembers what each forward ran, and judges it: no step of both kinds, no background token
    while a foreground request is there, and no more than `background_chunk` of them."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine)
        self.steps: list[tuple[bool, int]] = []  # background?, tokens
        run: Callable[[Sequence[Row]], Any] = engine._runner.run

        def watched(rows: Sequence[Row]) -> Any:
            kinds = {row.seq.background for row in rows}
            assert len(kinds) == 1, "foreground and background rows in one step"
            foreground = any(not live.seq.background for live in engine._live.values())
            assert kinds == {not foreground}, "background work ran although a foreground request was there"
            tokens = sum(row.count for row in rows)
            assert tokens <= (engine.config.max_batch_tokens if foreground else engine.config.background_chunk)
            self.steps.append((not foreground, tokens))
            return run(rows)

        engine._runner.run = watched  # type: ignore[method-assign]  # looks, and runs the real one

    def until_idle(self) -> None:
        while self.engine.has_work():
            self.step()
        assert self.engine.stats().blocks_used == 0

    def steps_until(self, request_id: str) -> int:
        """Steps until the first id of a request."""
        count = 0
        while not self.ids.get(request_id):
            self.step()
            count += 1
        return count


def engine(pages: int = 64, **settings: object) -> LocalEngine:
    values: dict[str, object] = {"max_batch_tokens": 64, "max_running": 4, "background_chunk": CHUNK} | settings
    return tiny_engine(pages, **values)


def test_background_work_alone_runs_in_short_steps_and_gives_the_plain_answer() -> None:
    run = Watched(engine())
    prompts = {"a": ids(1, 50), "b": ids(2, 21)}
    run.run(*(request(name, prompt, 20, priority=LOW) for name, prompt in prompts.items()))
    assert run.ids == {name: TINY.greedy(prompt, 20) for name, prompt in prompts.items()}
    assert max(tokens for _, tokens in run.steps) == CHUNK


@pytest.mark.parametrize("after_steps", [1, 3, 7, 12])
def test_a_foreground_prompt_runs_in_the_very_next_step(after_steps: int) -> None:
    run = Watched(engine())
    run.engine.submit(request("low", ids(1, 60), 20, priority=LOW))
    for _ in range(after_steps):
        run.step()
    run.engine.submit(request("turn", ids(2, 40), 10))
    assert run.steps_until("turn") == 1
    run.until_idle()
    assert run.ids == {"low": TINY.greedy(ids(1, 60), 20), "turn": TINY.greedy(ids(2, 40), 10)}


def test_paused_work_keeps_its_pages_and_computes_nothing_twice() -> None:
    run = Watched(engine())
    run.engine.submit(request("low", ids(1, 60), 20, priority=LOW))
    for turn in range(6):
        run.step()
        run.step()
        run.engine.submit(request(f"turn{turn}", ids(10 + turn, 11), 5))
        while f"turn{turn}" not in run.last:
            run.step()
    run.until_idle()
    stats = run.engine.stats()
    assert run.ids["low"] == TINY.greedy(ids(1, 60), 20)
    assert (stats.prefill_tokens, stats.preemptions) == (60 + 6 * 11, 0)


def test_paused_work_gives_way_when_pages_run_out_and_ends_rightly() -> None:
    run = Watched(engine(pages=14))
    run.engine.submit(request("low", ids(1, 60), 20, priority=LOW))
    for _ in range(5):
        run.step()
    run.engine.submit(request("one", ids(2, 30), 20))
    run.engine.submit(request("two", ids(3, 30), 20))
    run.until_idle()
    assert run.ids == {"low": TINY.greedy(ids(1, 60), 20)} | {
        name: TINY.greedy(ids(seed, 30), 20) for name, seed in (("one", 2), ("two", 3))
    }
    assert run.engine.stats().preemptions == 1
    assert [output.request_id for output in run.outputs if output.finish][-1] == "low"


def test_background_work_takes_no_place_in_the_batch_from_a_turn() -> None:
    run = Watched(engine(max_running=1))
    run.engine.submit(request("low", ids(1, 20), 20, priority=LOW))
    for _ in range(5):
        run.step()
    run.engine.submit(request("turn", ids(2, 9), 4))
    assert run.steps_until("turn") == 1
    assert run.engine.stats().running == 2
    run.until_idle()
    assert run.engine.stats().preemptions == 0
    assert run.ids["low"] == TINY.greedy(ids(1, 20), 20)


def test_a_turn_on_a_prefix_that_is_half_prefilled_takes_what_is_written_and_does_not_wait() -> None:
    run = Watched(engine())
    shared = ids(1, 60)
    run.engine.submit(request("low", shared, 1, priority=LOW))
    for _ in range(4):
        run.step()  # 32 of the 60 tokens
    run.engine.submit(request("turn", [*shared, 1, 2], 4))
    assert run.steps_until("turn") == 1
    assert run.cached["turn"] == 32
    run.until_idle()
    assert run.ids == {"low": TINY.greedy(shared, 1), "turn": TINY.greedy([*shared, 1, 2], 4)}
    # and the background work goes on from the blocks that the turn wrote: 56 are full ones
    assert run.engine.stats().prefill_tokens == 32 + 30 + 4


def test_a_prefix_that_was_prefilled_in_the_background_is_reused() -> None:
    run = Watched(engine())
    prompt = ids(1, 60)
    run.run(request("low", prompt, 1, priority=LOW))
    run.run(request("turn", [*prompt, 3], 4))
    assert run.cached["turn"] == 56


def test_a_turn_waits_for_a_block_that_another_turn_computes_though_not_for_background_work() -> None:
    run = Watched(engine(max_batch_tokens=16))
    shared = ids(2, 48)
    run.engine.submit(request("low", shared, 1, priority=LOW))
    run.step()
    run.engine.submit(request("one", [*shared, 1], 4))
    run.engine.submit(request("two", [*shared, 2], 4))
    run.until_idle()
    assert run.cached == {"low": 0, "one": 8, "two": 48}
    assert run.ids["two"] == TINY.greedy([*shared, 2], 4)


def digest_of(*parts: list[int]) -> bytes:
    digest = EMPTY_DIGEST
    for part in parts:
        digest = chain_digest(digest, array("I", part).tobytes())
    return digest


def test_background_work_goes_on_from_a_sessions_path_and_leaves_it_as_it_was() -> None:
    run = Watched(engine())
    run.run(request("turn", ids(1, 21), 6, session="s"))
    path = [*ids(1, 21), *run.ids["turn"]]
    base = Base(len(path), digest_of(ids(1, 21), run.ids["turn"]))
    run.run(request("summary", ids(2, 9), 30, base=base, session="s", priority=LOW))
    assert run.cached["summary"] == len(path) - 1
    assert run.ids["summary"] == TINY.greedy(path + ids(2, 9), 30)
    run.run(request("next", ids(3, 5), 6, base=base, session="s"))
    assert run.cached["next"] == len(path) - 1
    assert run.ids["next"] == TINY.greedy(path + ids(3, 5), 6)


def test_what_background_work_wrote_under_a_sessions_name_goes_with_the_session() -> None:
    run = Watched(engine())
    run.run(request("turn", ids(1, 21), 6, session="s"))
    run.run(request("prefix", ids(2, 40), 1, session="s", priority=LOW))
    run.engine.submit(request("paused", ids(3, 40), 1, session="s", priority=LOW))
    run.step()
    run.engine.forget("s", "")
    run.step()
    assert run.last["paused"].finish == "cancelled"
    assert run.engine.stats().blocks_free == run.engine.stats().blocks_total


def test_background_work_that_waits_takes_no_turns_place_in_the_queue() -> None:
    core = engine(max_waiting=2)
    for name in "ab":
        core.submit(request(name, [1], priority=LOW))
    with pytest.raises(EngineOverloaded):
        core.submit(request("c", [1], priority=LOW))
    core.submit(request("d", [1]))
    core.submit(request("e", [1]))
    with pytest.raises(EngineOverloaded):
        core.submit(request("f", [1]))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_comes_and_goes_every_answer_is_the_plain_one(seed: int) -> None:
    draw = random.Random(seed)
    run = Watched(engine(pages=draw.choice([14, 20, 40]), max_batch_tokens=draw.choice([8, 24]), max_running=3))
    shared = ids(99, 40)
    asked: dict[str, tuple[list[int], int]] = {}
    cancelled: set[str] = set()
    for number in range(16):
        name, count = str(number), draw.randint(1, 25)
        prompt = [*shared[: draw.choice([0, 8, 24, 40])], *ids(1000 * seed + number, draw.randint(1, 30))]
        asked[name] = (prompt, count)
        run.engine.submit(request(name, prompt, count, priority=draw.choice([-1, 0, 0, 1, 1, LOW])))
        for _ in range(draw.randint(0, 9)):
            run.step()
        if draw.random() < 0.2:
            cancelled.add(victim := draw.choice(list(asked)))
            run.engine.abort(victim)
    run.until_idle()
    for name, (prompt, count) in asked.items():
        right = TINY.greedy(prompt, count)
        if name in cancelled:
            assert run.ids[name] == right[: len(run.ids[name])]
        else:
            assert run.ids[name] == right
    assert {background for background, _ in run.steps} == {True, False}
