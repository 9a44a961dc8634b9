"""A replica's health: what probes and traffic show of it, and how it comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engines.contract import (
    Capabilities,
    EngineBroken,
    EngineLoad,
    EngineLost,
    EngineOverloaded,
    EngineUnreachable,
)
from engines.echo import EchoEngine
from engines.kv_events import FeedItem
from engines.kv_stream import KvStream
from gateway.fleet.fleet import Fleet
from gateway.fleet.queue import DEFAULT_LIMIT, Withdrawn
from gateway.fleet.replica import HISTORY, MOST_REST_S, REST_S, Replica, Silent

CAPS = Capabilities(kind="echo", models=("echo",), takes_ids=True, epoch="e1")


def well(now: float = 0.0) -> Replica:
    replica = Replica(EchoEngine(name="a"), "a")
    assert replica.state == "connecting"
    replica.probe_answered(CAPS, EngineLoad(), now)
    assert replica.state == "ready"
    return replica


def broken(replica: Replica, now: float) -> None:
    replica.failed(EngineBroken("500"), now, lost=False)


def states(replica: Replica) -> list[str]:
    return [change.state for change in replica.history]


def test_three_failed_turns_in_a_row_rest_it_and_an_answer_between_them_does_not() -> None:
    replica = well()
    broken(replica, 1.0)
    broken(replica, 1.0)
    replica.answered(1.0)
    broken(replica, 2.0)
    broken(replica, 2.0)
    assert replica.available(2.0)
    broken(replica, 2.0)
    assert not replica.available(2.0)
    assert replica.state == "resting"


def test_a_good_probe_does_not_outweigh_failed_turns_but_lets_one_turn_try() -> None:
    replica = well()
    for _ in range(3):
        broken(replica, 10.0)
    replica.probe_answered(CAPS, EngineLoad(), 10.0 + REST_S / 2)
    assert not replica.available(10.0 + REST_S / 2)
    replica.probe_answered(CAPS, EngineLoad(), 10.0 + REST_S)
    assert replica.state == "trial"
    assert replica.available(12.0)
    replica.trials = 1
    assert not replica.available(12.0), "one at a time"
    replica.trials = 0
    replica.answered(12.5)
    assert (replica.state, replica.failures) == ("ready", 0)


def test_a_failed_trial_rests_twice_as_long_and_never_longer_than_a_return_within_five_seconds_allows() -> None:
    replica, now = well(), 0.0
    for _ in range(3):
        broken(replica, now)
    rests = []
    for _ in range(5):
        rests.append(replica.rest_until - now)
        now = replica.rest_until
        replica.probe_answered(CAPS, EngineLoad(), now)
        broken(replica, now)
    assert rests == [REST_S, *[MOST_REST_S] * 4]
    assert MOST_REST_S + 1.0 <= 5.0


def test_one_that_was_down_or_restarted_is_ready_with_its_first_good_probe() -> None:
    down = well()
    down.failed(EngineLost("cut"), 1.0, lost=True)
    down.probe_failed("connection refused", 1.5, late=False)
    assert down.state == "down"
    down.probe_answered(CAPS, EngineLoad(), 1.6)
    assert (down.state, down.available(1.6)) == ("ready", True)
    quick = well()
    quick.failed(EngineLost("cut"), 1.0, lost=True)
    quick.probe_answered(replace(CAPS, epoch="e2"), EngineLoad(), 1.1)
    assert quick.available(1.1), "it came back as another life before a probe could fail"


def test_the_log_tells_what_became_of_it_and_why() -> None:
    with capture_logs() as log:
        replica = well()
        replica.probe_failed("nothing there", 1.0, late=False)
        replica.probe_failed("nothing there", 2.0, late=False)
        replica.probe_answered(CAPS, EngineLoad(), 3.0)
    told = [(line["log_level"], line["replica"], line["state"], line["reason"]) for line in log]
    assert told == [
        ("warning", replica.name, "down", "nothing there"),
        ("info", replica.name, "ready", "it answers"),
    ]


def test_one_late_probe_is_a_busy_moment_and_two_are_a_hang() -> None:
    replica = well()
    replica.probe_failed("late", 1.0, late=True)
    assert replica.available(1.0)
    replica.probe_answered(CAPS, EngineLoad(), 2.0)
    replica.probe_failed("late", 3.0, late=True)
    assert replica.available(3.0)
    replica.probe_failed("late", 4.0, late=True)
    assert replica.state == "down"


def test_while_its_turns_are_answered_late_probes_say_nothing() -> None:
    replica = well()
    for second in range(1, 20):
        replica.heard_at = second - 1.0
        replica.probe_failed("late", float(second), late=True)
    assert replica.state == "ready"
    replica.probe_failed("late", 30.0, late=True)
    replica.probe_failed("late", 31.0, late=True)
    assert replica.state == "down"


def test_turns_that_a_dead_replica_takes_with_it_keep_it_away_no_longer() -> None:
    replica = well()
    replica.failed(EngineLost("cut"), 1.0, lost=True)
    for second in (1.5, 2.0, 2.5):
        replica.failed(EngineLost("cut"), second, lost=True)
    assert replica.rest_until == 1.0 + REST_S
    assert states(replica) == ["ready", "resting"]


def test_a_busy_replica_and_one_that_is_left_for_another_have_not_failed() -> None:
    replica = well()
    for _ in range(10):
        replica.failed(EngineOverloaded("429"), 1.0, lost=False)
        replica.failed(Withdrawn("drained"), 1.0, lost=True)
    assert (replica.state, replica.failures) == ("ready", 0)


def test_a_drained_replica_takes_nothing_however_well_it_is_and_says_why() -> None:
    replica = well()
    replica.drain("a new driver", 5.0)
    replica.probe_answered(CAPS, EngineLoad(), 6.0)
    assert (replica.state, replica.available(6.0)) == ("draining", False)
    replica.drain("nothing is left", 7.0, drained=True)
    replica.undrain(8.0)
    assert replica.available(8.0)
    assert [(c.at, c.state, c.reason) for c in replica.history][-3:] == [
        (5.0, "draining", "a new driver"),
        (7.0, "drained", "nothing is left"),
        (8.0, "ready", "it takes turns again"),
    ]


def test_the_engine_says_how_many_it_works_on_unless_somebody_knows_better() -> None:
    replica = well()
    assert replica.queue.limit == DEFAULT_LIMIT
    replica.probe_answered(replace(CAPS, max_running=8), EngineLoad(), 1.0)
    assert replica.queue.limit == 8
    for nonsense in (0, -1, True, "many", 2.5):
        replica.probe_answered(replace(CAPS, max_running=nonsense), EngineLoad(), 1.5)  # type: ignore[arg-type]
        assert replica.queue.limit == DEFAULT_LIMIT
    replica.max_in_flight = 3
    replica.probe_answered(replace(CAPS, max_running=8), EngineLoad(), 2.0)
    assert replica.queue.limit == 3


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("good", "refused", "late", "lost", "broken", "answered", "restarted", "drain", "undrain")),
        st.floats(0, 3),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_happened_it_is_back_within_five_seconds_of_good_probes_and_answers(
    steps: list[tuple[str, float]],
) -> None:
    replica, now, epoch = Replica(EchoEngine(name="a"), "a"), 0.0, 0
    for what, passed_s in steps:
        now += passed_s
        epoch += what == "restarted"
        match what:
            case "good" | "restarted":
                replica.probe_answered(replace(CAPS, epoch=f"e{epoch}"), EngineLoad(), now)
            case "refused" | "late":
                replica.probe_failed(what, now, late=what == "late")
            case "lost" | "broken":
                replica.failed(
                    EngineUnreachable("x") if what == "lost" else EngineBroken("x"), now, lost=what == "lost"
                )
            case "answered":
                replica.answered(now)
            case "drain":
                replica.drain("x", now)
            case "undrain":
                replica.undrain(now)
        assert not (replica.available(now) and (replica.draining or replica.capabilities is None))
        assert len(replica.history) <= HISTORY
    replica.undrain(now)
    for _ in range(5):
        now += 1.0
        replica.probe_answered(replace(CAPS, epoch=f"e{epoch}"), EngineLoad(), now)
    assert replica.available(now)
    replica.answered(now)
    assert replica.state == "ready"


class Hanging(EchoEngine):
    async def capabilities(self) -> Capabilities:
        await asyncio.sleep(3600)
        raise AssertionError("unreachable")


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Fleet, None]:
    often = {"PROBE_EVERY_S": 0.01, "PROBE_AGAIN_S": 0.01, "PROBE_TIMEOUT_S": 0.3, "FEED_AGAIN_S": 0.01}
    for name, value in often.items():
        monkeypatch.setattr(f"gateway.fleet.fleet.{name}", value)

    async def nothing(replica: Replica, capabilities: Capabilities) -> None: ...

    made = Fleet(clock=asyncio.get_running_loop().time, on_probed=nothing)
    async with made.running():
        yield made


@pytest.mark.anyio
async def test_a_replica_that_hangs_delays_the_probes_of_no_other(fleet: Fleet) -> None:
    counted = 0

    class Counting(EchoEngine):
        async def capabilities(self) -> Capabilities:
            nonlocal counted
            counted += 1
            return await super().capabilities()

    await fleet.join(Replica(Counting(name="well"), "well"))
    joining = asyncio.create_task(fleet.join(Replica(Hanging(name="hangs"), "hangs")))
    while counted < 10:
        assert not joining.done(), "the others waited for the one that hangs"
        await asyncio.sleep(0.01)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


@pytest.mark.anyio
async def test_a_removed_replica_ends_its_turns_before_it_is_closed(fleet: Fleet) -> None:
    closed = asyncio.Event()

    class Closing(EchoEngine):
        async def aclose(self) -> None:
            closed.set()

    replica = Replica(Closing(name="a"), "a")
    left: list[str] = []
    fleet.on_left.append(lambda gone: left.append(gone.name))
    await fleet.join(replica)
    async with replica.taken("t"):
        fleet.leave("a")
        await asyncio.sleep(0.01)
        assert (list(fleet), left, closed.is_set()) == ([], ["a"], False)
    await asyncio.wait_for(closed.wait(), 5)


@pytest.mark.anyio
async def test_what_goes_wrong_inside_the_gateway_with_the_first_probe_is_tried_again(fleet: Fleet) -> None:
    tries = 0

    async def learn(replica: Replica, capabilities: Capabilities) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("the disk is full")

    fleet._on_probed = learn
    replica = Replica(EchoEngine(name="a"), "a")
    await fleet.join(replica)
    assert replica.state == "connecting"
    for _ in range(500):
        if replica.state == "ready":
            return
        await asyncio.sleep(0.01)
    raise AssertionError(replica.state)


@pytest.mark.anyio
@pytest.mark.parametrize("alone", [True, False])
async def test_what_runs_at_a_replica_that_hangs_goes_on_elsewhere_where_there_is_an_elsewhere(
    fleet: Fleet, alone: bool
) -> None:
    class Stopping(EchoEngine):
        hangs = False

        async def capabilities(self) -> Capabilities:
            if self.hangs:
                await asyncio.sleep(3600)
            return await super().capabilities()

    engine = Stopping(name="hangs")
    hanging = Replica(engine, "hangs")
    await fleet.join(hanging)
    if not alone:
        await fleet.join(Replica(EchoEngine(name="well"), "well"))

    async def turn() -> str:
        try:
            async with hanging.taken("t"):
                await asyncio.sleep(3600)
        except Silent:
            return "elsewhere"
        raise AssertionError("unreachable")

    running, cancelled = asyncio.create_task(turn()), asyncio.create_task(turn())
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    engine.hangs = True
    if not alone:
        assert await asyncio.wait_for(running, 10) == "elsewhere"
    for _ in range(500):
        if hanging.state == "down":
            break
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert (hanging.state, running.done(), hanging.in_flight) == ("down", not alone, int(alone))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.anyio
async def test_an_engine_that_tells_of_its_cache_later_is_heard_then(fleet: Fleet) -> None:
    class Late(EchoEngine):
        tells = False

        def kv_feed(self) -> AsyncGenerator[FeedItem, None] | None:
            return super().kv_feed() if self.tells else None

    engine = Late(name="a", kv=KvStream(time.time))
    await fleet.join(Replica(engine, "a"))
    await asyncio.sleep(0.05)
    assert not fleet.outlook.tells("a")
    engine.tells = True
    for _ in range(500):
        if fleet.outlook.tells("a"):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("its feed is not heard")
