"""Placement is a plain function: pins, restarts, load, failover."""

from __future__ import annotations

import dataclasses

import pytest

from engines.contract import Capabilities, EngineLoad, EngineTimeout, EngineUnreachable
from engines.echo import EchoEngine
from gateway.fleet.placement import Pin, choose
from gateway.fleet.replica import REST_S, Replica

CAPS = Capabilities(kind="echo", models=("echo",), takes_ids=True, epoch="e1")


def replica(name: str, **more: object) -> Replica:
    made = Replica(EchoEngine(name=name), url=name, capabilities=CAPS, healthy=True)
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def test_a_session_stays_where_its_cache_is_even_when_another_replica_is_idle() -> None:
    busy = replica("a", in_flight=5)
    placed = choose([busy, replica("b")], model="echo", pin=Pin("a", "e1"), path_tokens=100, now=0.0)
    assert placed is not None
    assert (placed.replica.name, placed.reason, placed.expected_cached_tokens) == ("a", "pinned", 100)


def test_a_restarted_replica_is_expected_to_have_nothing_cached() -> None:
    placed = choose([replica("a")], model="echo", pin=Pin("a", "e0"), path_tokens=100, now=0.0)
    assert placed is not None
    assert (placed.reason, placed.expected_cached_tokens) == ("pinned", 0)


def test_a_new_session_goes_where_the_least_work_is() -> None:
    loaded = replica("a", load=EngineLoad(waiting=3))
    placed = choose([loaded, replica("b", in_flight=1)], model="echo", pin=None, path_tokens=0, now=0.0)
    assert placed is not None
    assert (placed.replica.name, placed.reason) == ("b", "least_loaded")


def test_a_pin_that_is_away_is_named_as_the_reason() -> None:
    gone = replica("a", healthy=False)
    placed = choose([gone, replica("b")], model="echo", pin=Pin("a", "e1"), path_tokens=9, now=0.0)
    assert placed is not None
    assert (placed.replica.name, placed.reason, placed.expected_cached_tokens) == ("b", "pin_unavailable", 0)


@pytest.mark.parametrize("state", [{"draining": True}, {"healthy": False}, {"rest_until": 5.0}, {"capabilities": None}])
def test_nobody_who_cannot_take_it_is_chosen(state: dict[str, object]) -> None:
    assert choose([replica("a", **state)], model="echo", pin=None, path_tokens=0, now=0.0) is None


def test_failover_never_asks_the_same_replica_twice() -> None:
    placed = choose([replica("a"), replica("b")], model="echo", pin=Pin("a", "e1"), path_tokens=9, now=0.0, tried=["a"])
    assert placed is not None
    assert (placed.replica.name, placed.reason) == ("b", "failover")
    assert choose([replica("a")], model="echo", pin=None, path_tokens=0, now=0.0, tried=["a"]) is None


def test_a_lost_connection_rests_a_replica_at_once_and_refusals_only_after_three() -> None:
    lost = replica("a")
    lost.failed(EngineUnreachable("gone"), now=1.0, lost=True)
    assert not lost.available(1.0)
    assert lost.rest_until == 1.0 + REST_S
    slow = replica("b")
    for _ in range(2):
        slow.failed(EngineTimeout("late", stage="first_delta"), now=1.0, lost=False)
    assert slow.available(1.0)
    slow.failed(EngineTimeout("late", stage="first_delta"), now=1.0, lost=False)
    assert not slow.available(10.0)
