"""Sessions in the engine: a path goes on in its own tail block, branches at a mark, is forgotten, is never a pin."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest

from engines.contract import EMPTY_DIGEST, Base, UnknownBase, chain_digest
from engines.local.engine import LocalEngine
from tests.engines.local.tiny import VOCAB, Answers, TinyModel, request, tiny_engine

TINY = TinyModel()


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


class Talk:
    """A client of one session: knows the path and its digests as the gateway does."""

    def __init__(self, run: Answers, name: str = "s", salt: str = "t") -> None:
        self.run, self.name, self.salt = run, name, salt
        self.path: list[int] = []
        self.marks: list[Base] = [Base(0, EMPTY_DIGEST)]
        self.turns = 0

    def _grow(self, more: list[int]) -> None:
        if more:
            digest = chain_digest(self.marks[-1].digest, array("I", more).tobytes())
            self.path += more
            self.marks.append(Base(len(self.path), digest))

    def say(self, delta: list[int], max_tokens: int = 6) -> str:
        """One turn, whose answer must be the plain one -> the request's id."""
        name = f"{self.name}{self.turns}"
        self.turns += 1
        base = self.marks[-1] if self.path else None
        self.run.run(request(name, delta, max_tokens, base=base, session=self.name, salt=self.salt))
        self._grow(delta)
        assert self.run.ids[name] == TINY.greedy(self.path, max_tokens)
        self._grow(self.run.ids[name])
        return name

    def back_to(self, mark: int) -> None:
        self.marks = self.marks[: mark + 1]
        self.path = self.path[: self.marks[-1].length]


def test_ten_turns_reuse_all_but_the_last_token() -> None:
    talk = Talk(Answers(tiny_engine()))
    for turn in range(10):
        length = len(talk.path)
        name = talk.say(ids(turn, 5 + turn), 4 + turn % 3)
        assert talk.run.cached[name] == max(length - 1, 0)


def test_a_turn_without_new_ids_reruns_one_token() -> None:
    talk = Talk(Answers(tiny_engine()))
    talk.say(ids(1, 11))
    length = len(talk.path)
    assert talk.run.cached[talk.say([], 3)] == length - 1


@pytest.mark.parametrize("mark", [1, 2, 3, 4])
def test_a_branch_at_an_earlier_mark_copies_the_block_it_leaves(mark: int) -> None:
    talk = Talk(Answers(tiny_engine()))
    for turn in range(3):
        talk.say(ids(turn, 9), 5)
    talk.back_to(mark)
    length = len(talk.path)
    assert talk.run.cached[talk.say(ids(77, 7), 5)] == length


def test_the_old_branch_is_no_mark_any_more() -> None:
    talk = Talk(Answers(tiny_engine()))
    talk.say(ids(1, 9))
    talk.say(ids(2, 9))
    old = talk.marks[-1]
    talk.back_to(1)
    talk.say(ids(3, 9))
    with pytest.raises(UnknownBase):
        talk.run.engine.submit(request("x", [1], base=old, session="s", salt="t"))


def test_an_unknown_base_is_refused_and_nothing_is_kept() -> None:
    engine = tiny_engine()
    talk = Talk(Answers(engine))
    talk.say(ids(1, 9))
    for base, session, salt in (
        (talk.marks[-1], "other", "t"),
        (talk.marks[-1], "s", "other tenant"),
        (Base(len(talk.path), b"x" * 32), "s", "t"),
        (Base(3, talk.marks[-1].digest), "s", "t"),
    ):
        with pytest.raises(UnknownBase):
            engine.submit(request("x", [1], base=base, session=session, salt=salt))
    assert not engine.has_work()


def test_the_whole_history_sent_again_reuses_as_much_as_a_base() -> None:
    run = Answers(tiny_engine())
    talk = Talk(run)
    talk.say(ids(1, 13))
    whole = talk.path + ids(2, 6)
    run.run(request("again", whole, session="s", salt="t"))
    assert run.cached["again"] == len(talk.path) - 1
    assert run.ids["again"] == TINY.greedy(whole, 8)


def test_two_requests_of_one_session_at_once_do_not_write_into_one_page() -> None:
    run = Answers(tiny_engine())
    talk = Talk(run)
    talk.say(ids(1, 13))
    base, path = talk.marks[-1], list(talk.path)
    one, two = ids(2, 20), ids(3, 20)
    run.run(*(request(name, delta, base=base, session="s", salt="t") for name, delta in (("one", one), ("two", two))))
    assert run.ids["one"] == TINY.greedy(path + one, 8)
    assert run.ids["two"] == TINY.greedy(path + two, 8)
    assert run.cached["one"] == run.cached["two"] == len(path) - 1


def test_a_pool_full_of_idle_sessions_admits_whoever_comes() -> None:
    engine = tiny_engine(pages=20)
    run = Answers(engine)
    talks = [Talk(run, f"s{n}-") for n in range(8)]
    for turn in range(3):
        for n, talk in enumerate(talks):
            talk.say(ids(10 * n + turn, 12))
    assert engine.stats().evictions > 0
    assert engine.stats().sessions == 8
    prompt = ids(99, 140)
    run.run(request("big", prompt))
    assert run.ids["big"] == TINY.greedy(prompt, 8)


def test_an_evicted_session_is_computed_again_from_its_ids() -> None:
    engine = tiny_engine(pages=12)
    talk = Talk(Answers(engine))
    talk.say(ids(1, 30))
    talk.run.run(request("big", ids(2, 80)))
    name = talk.say(ids(3, 5))
    assert talk.run.cached[name] < len(talk.path) - 15


def test_a_cancelled_answer_leaves_a_path_to_go_on_from() -> None:
    engine = tiny_engine()
    run = Answers(engine)
    engine.submit(request("a", ids(1, 13), 50, session="s", salt="t"))
    for _ in range(6):
        run.step()
    engine.abort("a")
    run.step()
    got = run.ids["a"]
    digest = chain_digest(chain_digest(EMPTY_DIGEST, array("I", ids(1, 13)).tobytes()), array("I", got).tobytes())
    base = Base(13 + len(got), digest)
    run.run(request("b", [5, 6], base=base, session="s", salt="t"))
    assert run.cached["b"] == base.length - 1
    assert run.ids["b"] == TINY.greedy(ids(1, 13) + got + [5, 6], 8)


def test_the_oldest_session_goes_when_there_are_too_many() -> None:
    engine = tiny_engine(max_sessions=2)
    run = Answers(engine)
    talks = [Talk(run, name) for name in "xyz"]
    for talk in talks:
        talk.say(ids(1, 5))
    assert [kept.session for kept in engine.sessions()] == ["y", "z"]
    with pytest.raises(UnknownBase):
        engine.submit(request("q", [1], base=talks[0].marks[-1], session="x", salt="t"))


def holds_anywhere(engine: LocalEngine, page_values: np.ndarray) -> bool:
    """Whether some page still shows these K/V values [slots, dim]."""
    values = engine._runner._storage.values[0].flatten(0, 2).numpy()
    return bool((np.abs(values[:, None] - page_values[None]).max(-1) == 0).any())


def test_forgetting_zeroes_what_nobody_else_uses() -> None:
    engine = tiny_engine(debug_nan_fill=False)
    run = Answers(engine)
    system = ids(0, 16)
    one, two = Talk(run, "one"), Talk(run, "two")
    one.say(system + ids(1, 20))
    two.say(system + ids(2, 20))
    _, _, secret = TINY.parts(*(torch_ids(one.path[17:40], 17)))
    assert holds_anywhere(engine, secret.numpy())
    freed = engine.forget("one", "t").blocks
    engine.check()
    assert (
        freed == 5 + 1 - 2
    )  # 41 written tokens: 5 full blocks and a tail, 2 of the blocks being the other session's too
    assert not holds_anywhere(engine, secret.numpy())
    assert [kept.session for kept in engine.sessions()] == ["two"]
    length = len(two.path)
    assert run.cached[two.say(ids(5, 4))] == length - 1
    assert engine.forget("two", "t").blocks >= 3
    assert engine.stats().blocks_free == engine.stats().blocks_total
    assert len(engine._cache.index) == 0


def test_forgetting_zeroes_what_the_session_left_in_free_pages() -> None:
    engine = tiny_engine(debug_nan_fill=False)
    talk = Talk(Answers(engine))
    talk.say(ids(1, 16))
    talk.say(ids(2, 11))
    left = talk.path[32:]  # 33 ids: the partial tail, of which all but the last id is written
    assert len(left) >= 3
    _, _, secret = TINY.parts(*torch_ids(left[:-1], 32))
    talk.back_to(1)
    talk.say(ids(3, 9))  # the path is another one, and nobody will come back for that tail
    assert holds_anywhere(engine, secret.numpy())
    free = engine.stats().blocks_free
    freed = engine.forget("s", "t").blocks
    engine.check()
    assert engine.stats().blocks_free == free + freed
    assert not holds_anywhere(engine, secret.numpy())


def test_a_page_that_changes_hands_shows_nothing_of_whoever_had_it() -> None:
    engine = tiny_engine(8, debug_nan_fill=False)
    run = Answers(engine)
    secret = [40 + n % 24 for n in range(60)]  # eight pages of eight, the other's last one only half full
    run.run(request("a", secret, 1, session="one", salt="t"))
    _, _, said = TINY.parts(*torch_ids(secret, 0))
    assert holds_anywhere(engine, said.numpy())
    run.run(request("b", [n % 40 for n in range(58)], 1, session="two", salt="t"))
    assert not holds_anywhere(engine, said[:58].numpy()), "all pages are the other's now"
    assert not holds_anywhere(engine, said[58:].numpy()), "and what it has not written over, nobody would find"
    assert engine.forget("one", "t").blocks == 0


def torch_ids(path: list[int], start: int):  # type: ignore[no-untyped-def]
    import torch

    return torch.tensor(path), torch.arange(start, start + len(path))


def test_forgetting_reaches_branches_that_were_left_and_requests_that_run() -> None:
    engine = tiny_engine(max_sessions=1)
    run = Answers(engine)
    talk = Talk(run)
    talk.say(ids(1, 20))
    talk.say(ids(2, 20))
    talk.back_to(1)
    talk.say(ids(3, 20))
    engine.submit(request("running", ids(4, 30), 40, session="s", salt="t"))
    run.step()
    engine.forget("s", "t")
    run.step()
    assert run.last["running"].finish == "cancelled"
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_forgetting_an_unknown_session_frees_nothing() -> None:
    engine = tiny_engine()
    Answers(engine).run(request("a", ids(1, 20)))
    assert engine.forget("s", "t").blocks == 0


def test_a_warmed_up_prompt_outlives_what_comes_after_it_and_stays_evictable() -> None:
    engine = tiny_engine(pages=40)
    run = Answers(engine)
    system = ids(7, 33)
    run.run(replace(request("warm", system, 1, salt="t"), pinned=True, priority=10))
    assert 0 < engine.stats().blocks_pinned <= 10
    for turn in range(12):
        run.run(request(f"other{turn}", ids(turn, 60), salt="t"))
    run.run(request("first", [*system, *ids(8, 9)], salt="t"))
    assert run.cached["first"] >= 32
    run.run(request("big", ids(9, 300), salt="t"))
    assert run.ids["big"] == TINY.greedy(ids(9, 300), 8)
    engine.check()
