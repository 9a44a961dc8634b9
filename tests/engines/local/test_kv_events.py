"""What an engine's events say is resident is what its pool holds, after whatever traffic."""

import random

import pytest

from engines.kv_events import BlockStored
from engines.kv_stream import ResidentBlocks
from tests.engines.local.resident import resident
from tests.engines.local.tiny import Answers, request, tiny_engine


@pytest.mark.parametrize("seed", range(4))
def test_the_events_of_random_traffic_add_up_to_the_pool(seed: int) -> None:
    """Sessions that grow, shared beginnings, two salts, aborts, forgotten sessions; the pool holds a tenth of it."""
    rng = random.Random(seed)
    engine = tiny_engine(pages=24, kv_events=True, max_running=4, max_batch_tokens=64)
    answers, told = Answers(engine), ResidentBlocks()
    batches = 0
    histories: dict[str, list[int]] = {}
    for number in range(40):
        session = f"s{rng.randrange(6)}"
        history = histories.setdefault(session, [rng.randrange(2)] * 8)
        history += [rng.randrange(60) for _ in range(rng.randrange(1, 24))]
        del history[120:]
        salt = "t" if session in ("s0", "s1") else ""
        engine.submit(request(str(number), history, rng.randrange(1, 12), session=session, salt=salt))
        if number % 3:
            continue
        while engine.has_work():
            if rng.random() < 0.05:
                engine.abort(str(number))
            answers.step()
            events = engine.kv_events()
            batches += bool(events)
            for event in events:
                told.apply(event)
            assert resident(told, "tiny") == resident(engine._cache.index, "tiny")
        if rng.random() < 0.3:
            engine.forget(session, salt)
            for event in engine.kv_events():
                told.apply(event)
            assert resident(told, "tiny") == resident(engine._cache.index, "tiny")
    assert engine.stats().evictions > 20
    assert batches > 20
    assert len(told) > 10


def test_a_step_that_publishes_several_blocks_tells_them_as_one() -> None:
    engine = tiny_engine(kv_events=True, max_batch_tokens=512)
    Answers(engine).run(request("1", list(range(40)), 1, salt="t"))
    [event] = engine.kv_events()
    assert isinstance(event, BlockStored)
    assert (len(event.hashes), event.block_size, event.medium, event.parent) == (5, 8, "GPU", None)
    assert event.salt == "t"
    assert event.spelled


def test_an_engine_that_is_not_asked_to_tells_nothing() -> None:
    engine = tiny_engine()
    Answers(engine).run(request("1", list(range(40)), 1))
    assert engine.kv_events() == ()


def test_events_without_prefix_reuse_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix_reuse"):
        tiny_engine(kv_events=True, prefix_reuse=False)
