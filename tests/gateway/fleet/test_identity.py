"""Two models under one name, as in a rolling upgrade: a session stays with the one that answered it while it can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.contract import Capabilities
from engines.echo import EchoEngine
from gateway.fleet.eligible import eligible
from gateway.fleet.identity import ModelIdentity
from gateway.fleet.outlook import Outlook
from gateway.fleet.outlook import Path as PromptPath
from gateway.fleet.placement import Pin, Placement, choose
from gateway.fleet.replica import Replica
from gateway.sessions.history import History
from gateway.sessions.moving import move
from gateway.sessions.snapshot import replica_for
from tests.faults.broken_echo import Fate, Mortal
from tests.gateway.live import Live, live_gateway

pytestmark = pytest.mark.anyio
OLD, NEW = ModelIdentity("old"), ModelIdentity("new")


def replica(name: str, fingerprint: str | None, **more: Any) -> Replica:
    told = {} if fingerprint is None else {"m": fingerprint}
    return Replica(EchoEngine(name=name), "", Capabilities("echo", ("m",), fingerprints=told), healthy=True, **more)


def placed(*replicas: Replica, answered: ModelIdentity | None, pin: Pin | None = None) -> Placement:
    found = choose(
        replicas, model="m", pin=pin, path=PromptPath(9, 9), outlook=Outlook(), now=0.0, at=0.0, answered=answered
    )
    assert found is not None
    return found


def test_only_replicas_of_the_model_that_answered_are_eligible_while_there_are_any() -> None:
    fleet = [replica("a", "old"), replica("b", "new"), replica("c", None), replica("z", "old", fallback=True)]
    names = {
        identity: [r.name for r in eligible(fleet, model="m", now=0.0, answered=identity)]
        for identity in (None, OLD, NEW, ModelIdentity(None), ModelIdentity("gone"))
    }
    assert names == {
        None: ["a", "b", "c"],
        OLD: ["a"],
        NEW: ["b"],
        ModelIdentity(None): ["c"],  # what cannot be told is no other's equal
        ModelIdentity("gone"): ["a", "b", "c"],  # the path begins anew
    }


def test_the_operators_word_names_what_an_engine_cannot() -> None:
    fleet = [replica("a", None, revision="2026-11"), replica("b", "abc", revision="2026-11"), replica("c", "abc")]
    assert [r.name for r in eligible(fleet, model="m", now=0.0, answered=ModelIdentity("2026-11"))] == ["a", "b"]


def test_a_change_of_model_is_said_with_both_names_and_a_stand_in_is_none() -> None:
    changed = placed(replica("b", "new"), answered=OLD, pin=Pin("a", "e"))
    assert (changed.reason, changed.as_json()["model_changed"]) == ("model_changed", {"from": "old", "to": "new"})
    kept = placed(replica("a", "old"), replica("b", "new"), answered=OLD)
    assert (kept.replica.name, kept.as_json()["fingerprint"]) == ("a", "old")
    assert "model_changed" not in kept.as_json()
    stand_in = placed(replica("z", None, fallback=True), answered=OLD)
    assert (stand_in.reason, stand_in.changed_from) == ("fallback", None)


@asynccontextmanager
async def upgrading(folder: Path, engines: Mapping[str, EchoEngine]) -> AsyncIterator[tuple[Live, str]]:
    """A gateway, and a session whose first turn the old model answered."""
    async with live_gateway(folder, engines) as live:
        for _ in range(20):
            session = await live.session(model="echo")
            turn = (await live.turn(session, f"one of {session}")).json()
            if turn["placement"]["fingerprint"] == "old":
                yield live, session
                return
    raise AssertionError("no session began at the old model")


async def test_a_session_stays_with_its_model_and_begins_anew_when_that_is_gone(tmp_path: Path) -> None:
    fleet = {name: EchoEngine(name=name, fingerprint=name[:3]) for name in ("old-1", "old-2", "new-1")}
    async with upgrading(tmp_path, fleet) as (live, session):
        ways = [(await live.turn(session, "two")).json()["placement"]]
        gateway = live.app.state.gateway
        gateway.fleet.leave(ways[0]["replica"])
        ways.append((await live.turn(session, "three")).json()["placement"])
        gateway.fleet.leave(ways[1]["replica"])
        changed = (await live.turn(session, "four")).json()
        after = (await live.turn(session, "five")).json()
        stored = await live.turns(session, include="token_ids")
    assert {way["replica"] for way in ways} == {"old-1", "old-2"}
    assert changed["placement"]["model_changed"] == {"from": "old", "to": "new"}
    assert (changed["placement"]["replica"], changed["placement"]["reason"]) == ("new-1", "model_changed")
    assert (changed["prefix_report"]["cause"], changed["prefix_report"]["reused_tokens"]) == ("model_changed", 0)
    assert changed["output"][0]["content"][0]["text"] == "four"
    assert changed["usage"]["cached_tokens"] == 0
    assert stored[3]["placement"]["model_changed"] == {"from": "old", "to": "new"}
    assert stored[3]["tokens"]["base_tokens"] == 0  # its ids are stored whole: they are a path of their own
    assert "model_changed" not in after["placement"]
    assert after["placement"]["reason"] == "pinned"
    assert after["prefix_report"]["reused_tokens"] == stored[3]["tokens"]["path_tokens"]


async def test_a_drained_session_finds_its_prefix_computed_by_the_new_model(tmp_path: Path) -> None:
    fleet = {name: EchoEngine(name=name, fingerprint=name) for name in ("old", "new")}
    async with upgrading(tmp_path, fleet) as (live, session):
        gateway = live.app.state.gateway
        room = gateway.room.compactions._room
        gateway.fleet.leave("old")
        (pinned,) = [p for p in await gateway.store.pinned_sessions("old", 1e6) if p.session_id == session]

        def where_to(model: str, history: History) -> Placement | None:
            return replica_for(model, history, gateway.fleet)

        assert await move(room, pinned, None, where_to, gateway.room.compactions.policy)
        turn = (await live.turn(session, "two")).json()
    assert turn["placement"]["model_changed"] == {"from": "old", "to": "new"}
    before = turn["usage"]["prompt_tokens"] - len("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    assert turn["usage"]["cached_tokens"] > 32
    assert turn["usage"]["cached_tokens"] >= before - 32  # to the block


async def test_a_turn_whose_replica_fails_before_its_first_byte_is_read_by_the_new_model(tmp_path: Path) -> None:
    fleet = {name: EchoEngine(name=name, fingerprint=name) for name in ("old", "new")}
    async with upgrading(tmp_path, fleet) as (live, session):
        fleet["old"]._fail_first = 1
        turn = (await live.turn(session, "two")).json()
    assert (turn["placement"]["reason"], turn["placement"]["replica"]) == ("failover", "new")
    assert turn["placement"]["model_changed"] == {"from": "old", "to": "new"}
    assert turn["output"][0]["content"][0]["text"] == "two"


async def test_an_answer_never_changes_its_model_in_its_course(tmp_path: Path) -> None:
    fate = Fate(times=0)
    fleet = {name: Mortal(name=name, fate=fate, fingerprint=name) for name in ("old", "new")}
    async with upgrading(tmp_path, fleet) as (live, session):
        fate.ids, fate.times = 3, 1
        answer = await live.turn(session, "a longer text")
        *_, turn = await live.turns(session)
        after = (await live.turn(session, "on")).json()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (502, "upstream_lost")
    assert "new: it serves another model under this name: new, where old began" in error["message"]
    assert (turn["status"], turn["output"][0]["content"][0]["text"]) == ("incomplete", "a l")
    assert after["placement"]["model_changed"] == {"from": "old", "to": "new"}
    assert after["output"][0]["content"][0]["text"] == "on"
