"""Replicas added, drained and removed while the gateway serves, by API and by command."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engines.echo import EchoEngine
from gateway.cli import main
from gateway.sealing import CannotOpen, seal, unseal
from gateway.store.replica_records import NewReplica
from tests.contracts.live import LiveServer
from tests.contracts.wire_app import create_app
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served

KEY = "sk-upstream-key-that-nobody-may-see"
ROUTE = "/admin/v1/replicas"


@dataclass
class Rig:
    gateway: Served
    engines: list[EchoEngine]  # "a" of the settings, then those that tests add
    servers: list[LiveServer]

    def call(self, method: str, path: str = "", **more: Any) -> Any:
        return self.gateway.client.request(method, ROUTE + path, **more)

    def shown(self, name: str) -> dict[str, Any]:
        answer = self.call("GET", f"/{name}")
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def until(self, name: str, state: str) -> dict[str, Any]:
        deadline = time.monotonic() + 20
        while (told := self.shown(name))["state"] != state:
            assert time.monotonic() < deadline, told
            time.sleep(0.05)
        return told

    def add(self, place: int, name: str, **more: Any) -> dict[str, Any]:
        answer = self.call("POST", json={"url": self.servers[place].url, "name": name, **more})
        assert answer.status_code == 201, answer.text
        told: dict[str, Any] = answer.json()
        return told


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with ExitStack() as stack:
        engines = [EchoEngine() for _ in range(3)]
        servers = [stack.enter_context(LiveServer(create_app(engine))) for engine in engines]
        upstreams = [{"url": servers[0].url, "name": "a"}]
        yield Rig(stack.enter_context(served(tmp_path, embed=False, upstreams=upstreams)), engines, servers)


def test_a_replica_is_added_serves_at_once_and_is_there_after_a_restart(rig: Rig, tmp_path: Path) -> None:
    told = rig.add(1, "b", api_key=KEY, max_in_flight=3)
    assert (told["source"], told["state"], told["max_in_flight"], told["has_api_key"]) == ("api", "ready", 3, True)
    assert rig.add(1, "b", api_key=KEY, max_in_flight=3)["name"] == "b", "the same once more"
    assert [r["name"] for r in rig.call("GET").json()["data"]] == ["a", "b"]
    assert KEY not in rig.call("GET").text + rig.call("GET", "/b").text
    assert KEY.encode() not in b"".join(path.read_bytes() for path in tmp_path.glob("turnkeep.db*"))
    upstreams = [{"url": rig.servers[0].url, "name": "a"}]
    with served(tmp_path, embed=False, upstreams=upstreams, gateway_name="other") as again:
        there = replace(rig, gateway=again)
        assert [there.until(r["name"], "ready")["name"] for r in there.call("GET").json()["data"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"url": "http://169.254.169.254/"}, 400, "address_refused"),
        ({"url": "http://[fe80::1]:80"}, 400, "address_refused"),
        ({"url": "http://127.0.0.1:1", "kv_events": "tcp://127.0.0.2:5557"}, 400, "address_refused"),
        ({"url": "http://127.0.0.1:1", "kv_events": "ipc:///run/other"}, 400, "address_refused"),
        ({"url": "http://127.0.0.1:1", "kv_events": "http://127.0.0.1:1"}, 400, "invalid_value"),
        ({"url": "ftp://127.0.0.1"}, 400, "invalid_value"),
        ({"url": "file:///etc/passwd"}, 400, "invalid_value"),
        ({"url": "http://user:word@127.0.0.1:1"}, 400, "invalid_value"),
        ({"url": "http://127.0.0.1:99999"}, 400, "invalid_value"),
        ({"url": "http://2852039166/"}, 400, "address_refused"),  # 169.254.169.254 as a number
        ({"url": "http://[::ffff:169.254.169.254]/"}, 400, "address_refused"),
        ({"url": "http://127.0.0.1:1/" + "x" * 1_000_000}, 400, "invalid_value"),
        ({"url": "http://127.0.0.1:1", "name": "x" * 1_000_000}, 400, "invalid_value"),
        ({"url": "http://127.0.0.1:1", "name": "x y"}, 400, "invalid_value"),
        ({"url": "http://127.0.0.1:1", "max_in_flight": 0}, 400, "invalid_value"),
        ({"url": "http://127.0.0.1:1", "tenant": "x"}, 400, "unknown_field"),
        ({"url": "http://127.0.0.1:1", "name": "a"}, 409, "replica_exists"),
        ({}, 400, "invalid_value"),
    ],
)
def test_what_is_no_replica_is_refused_and_not_kept(rig: Rig, body: dict[str, Any], status: int, code: str) -> None:
    with nothing_saved(rig.gateway):
        refused(rig.call("POST", json=body), status, code)


def test_one_that_answers_later_joins_when_it_does(rig: Rig) -> None:
    answer = rig.call("POST", json={"url": "http://127.0.0.1:9", "name": "later"})
    assert (answer.status_code, answer.json()["state"]) == (201, "connecting")
    assert "cannot be reached" in rig.shown("later")["last_error"]
    assert rig.call("DELETE", "/later").status_code == 200
    refused(rig.call("GET", "/later"), 404, "replica_not_found")


def test_the_last_replica_of_a_model_is_neither_drained_nor_removed_unless_forced(rig: Rig) -> None:
    refused(rig.call("POST", "/a/drain"), 409, "last_replica")
    refused(rig.call("DELETE", "/a"), 409, "replica_of_settings")
    assert rig.call("POST", "/a/drain", json={"force": True}).status_code == 202
    refused(rig.gateway.client.post("/v1/chat/completions", json={"model": "echo", "messages": [
        {"role": "user", "content": "x"}]}), 503, "no_replica")  # fmt: skip
    assert rig.call("POST", "/a/undrain").json()["state"] == "ready"


def test_a_drain_moves_its_sessions_with_their_prefix_and_lets_the_others_stay(rig: Rig) -> None:
    sessions = [rig.gateway.session(model="echo") for _ in range(6)]
    for session in sessions:
        rig.gateway.turn(session, f"a first message that is longer than one block of the engine, in {session}")
    rig.add(1, "b")
    rig.add(2, "c")
    assert rig.engines[0].paths.cached_blocks > 0
    order = rig.call("POST", "/a/drain", json={"reason": "a new driver", "timeout_s": 60})
    assert (order.status_code, order.json()["state"]) == (202, "draining")
    told = rig.until("a", "drained")
    assert told["draining"] | {"since": 0, "until": 0} == {
        "sessions_left": 0, "moved": 6, "released": 0, "failed": 0, "running": 0, "timed_out": False,
        "done": True, "since": 0, "until": 0, "reason": "a new driver",
    }  # fmt: skip
    assert [c["state"] for c in told["history"]][:2] == ["drained", "draining"]
    assert rig.engines[0].paths.cached_blocks == 0, "it was told to forget them"
    homes = []
    for session in sessions:
        turn = rig.gateway.client.get(f"/v1/sessions/{session}/turns/1").json()
        homes.append(turn["placement"]["home"]["replica"])
        after = rig.gateway.turn(session, "and on")
        assert (after["placement"]["replica"], after["placement"]["reason"]) == (homes[-1], "pinned")
        assert after["usage"]["cached_tokens"] >= 64, "its prefix was computed before it came"
    assert {name: homes.count(name) for name in "bc"} == {"b": 3, "c": 3}
    assert rig.call("POST", "/a/undrain").json()["state"] == "ready"
    for session, home in zip(sessions, homes, strict=True):
        assert rig.gateway.turn(session, "more")["placement"]["replica"] == home, "they stay where they are"


def test_a_gateway_that_does_not_know_yet_of_a_removal_drains_nothing_into_being(rig: Rig, tmp_path: Path) -> None:
    rig.add(1, "b")
    upstreams = [{"url": rig.servers[0].url, "name": "a"}]
    with served(tmp_path, embed=False, upstreams=upstreams, gateway_name="other") as other:
        assert rig.call("DELETE", "/b").status_code == 200
        for what in ("drain", "undrain"):
            refused(other.client.post(f"{ROUTE}/b/{what}"), 404, "replica_not_found")
        assert rig.add(1, "b")["state"] == "ready"
        assert other.client.post(f"{ROUTE}/b/drain").status_code == 202
        refused(rig.call("POST", "/a/drain"), 409, "last_replica")


def test_a_gateway_is_no_replica_of_itself(rig: Rig) -> None:
    body = {"url": f"{rig.gateway.url}/v1", "name": "self", "fallback": True}
    assert rig.call("POST", json=body).json()["state"] == "connecting"
    assert "is a Turnkeep gateway" in rig.shown("self")["last_error"]
    assert rig.call("POST", "/a/drain", json={"force": True}).status_code == 202
    ask = {"model": "echo", "messages": [{"role": "user", "content": "x"}]}
    began = time.monotonic()
    refused(rig.gateway.client.post("/v1/chat/completions", json=ask), 503, "no_replica")
    assert time.monotonic() - began < 1.0


def test_a_replica_whose_key_cannot_be_read_is_shown_until_it_is_removed(rig: Rig, tmp_path: Path) -> None:
    rig.add(1, "b", api_key=KEY)
    store = rig.gateway.gateway.store
    (record,) = rig.gateway.within(store.list_replicas())
    rig.gateway.within(store.remove_replica("b"))
    rig.gateway.within(store.add_replica(NewReplica("b", record.url or "", b"sealed elsewhere", record.terms), limit=9))
    rig.gateway.within(rig.gateway.gateway.roster.refresh())
    assert rig.shown("b")["state"] == "connecting"
    assert rig.call("DELETE", "/b").status_code == 200
    assert [r["name"] for r in rig.call("GET").json()["data"]] == ["a"]


def test_removing_a_replica_moves_only_its_own_sessions(rig: Rig) -> None:
    rig.add(1, "b")
    sessions = [rig.gateway.session(model="echo") for _ in range(8)]
    where = {s: rig.gateway.turn(s, f"hello from {s}")["placement"]["replica"] for s in sessions}
    assert rig.call("POST", "/b/drain", json={"timeout_s": 30}).status_code == 202
    rig.until("b", "drained")
    assert 'turnkeep_replica_up{replica="b"} 1.0' in rig.gateway.client.get("/metrics").text
    assert rig.call("DELETE", "/b").json() == {"object": "replica.removed", "name": "b", "removed": True}
    assert 'turnkeep_replica_up{replica="b"}' not in rig.gateway.client.get("/metrics").text
    assert [r["name"] for r in rig.call("GET").json()["data"]] == ["a"]
    for session, home in where.items():
        turn = rig.gateway.turn(session, "and on")
        assert turn["placement"]["replica"] == "a"
        if home == "a":
            assert turn["placement"]["reason"] == "pinned"


def test_a_key_opens_only_for_what_it_was_sealed_for() -> None:
    sealed = seal(b"s" * 32, KEY, "a http://a")
    assert KEY.encode() not in sealed
    assert unseal(b"s" * 32, sealed, "a http://a") == KEY
    for secret, text, purpose in (
        (b"t" * 32, sealed, "a http://a"),
        (b"s" * 32, sealed, "a http://evil"),
        (b"s" * 32, sealed[:-1], "a http://a"),
        (b"s" * 32, b"", "a http://a"),
    ):
        with pytest.raises(CannotOpen):
            unseal(secret, text, purpose)


def test_the_commands_do_the_same(
    rig: Rig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", KEY)

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["replicas", *words, "--url", rig.gateway.url])
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return out

    added = run("add", rig.servers[1].url, "--name", "b", "--api-key-variable", "UPSTREAM_KEY", "--json")
    assert json.loads(added)["state"] == "ready"
    assert [r["name"] for r in json.loads(run("list", "--json"))["data"]] == ["a", "b"]
    assert "b\tready\tturnkeep\techo\t0+0\tguess\t0\t\tapi\t" in run("list")
    assert json.loads(run("drain", "b", "--wait", "--reason", "tests", "--json"))["state"] == "drained"
    shown = run("show", "b")
    assert "drained: tests" in shown
    assert '"reason": "tests"' in shown
    assert "b is ready" in run("undrain", "b")
    assert "removed" in run("remove", "b")
