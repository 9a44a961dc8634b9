"""Limits over HTTP: what is refused leaves nothing behind, says when to come again, and is told in headers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from engines.echo import EchoEngine
from gateway.cli import app
from gateway.store.audit_records import AuditFilter
from gateway.tenancy import SCOPES
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.live import MODEL
from tests.gateway.served import Served, served

SLOW = "the keeper writes the hour into the book " * 40  # an answer of many seconds
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engines = {"echo": EchoEngine(tokens_per_s=40)}
    with served(tmp_path_factory.mktemp("limits"), engines, auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def admin(gateway: Served) -> dict[str, str]:
    return gateway.key(scopes=SCOPES)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    if (left_s := 60 - time.time() % 60) < 5:
        time.sleep(left_s + 0.1)  # a test stays within one minute of the clock
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]


@pytest.fixture
def tenant(gateway: Served, name: str) -> dict[str, str]:
    """A header with a key of a tenant that the test has to itself."""
    return gateway.key(tenant=name)


def key_of(headers: dict[str, str]) -> str:
    return headers["authorization"].removeprefix("Bearer ")[:11]


def limit(gateway: Served, admin: dict[str, str], where: str, **limits: int | None) -> None:
    answer = gateway.client.put(f"/admin/v1/limits/{where}", json=limits, headers=admin)
    assert answer.status_code == 200, answer.text


def chat(gateway: Served, headers: dict[str, str], **more: Any) -> httpx.Response:
    return gateway.client.post("/v1/chat/completions", json={**CHAT, **more}, headers=headers)


def until(condition: Callable[[], object]) -> None:
    for _ in range(300):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that within 15 s")


def test_without_a_limit_no_header_tells_of_any(gateway: Served, tenant: dict[str, str]) -> None:
    answer = chat(gateway, tenant)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if "ratelimit" in name]


def test_requests_a_minute(gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]) -> None:
    limit(gateway, admin, name, requests_per_minute=2)
    left = [chat(gateway, tenant).headers["x-ratelimit-remaining-requests"] for _ in range(2)]
    assert left == ["1", "0"]
    with nothing_saved(gateway):
        answer = chat(gateway, tenant)
        told = refused(answer, 429, "rate_limit_exceeded")
        assert told["type"] == "rate_limit_error"
        assert told["details"] == {"name": "requests_per_minute", "of": "tenant", "limit": 2}
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["ratelimit"].startswith('"requests";r=0;t=')
        refused(gateway.client.post("/v1/completions", json={"model": MODEL, "prompt": "a"}, headers=tenant), 429)
        refused(
            gateway.client.post("/v1/responses", json={"model": MODEL, "input": "a"}, headers=tenant),
            429,
            "rate_limit_exceeded",
        )
    assert gateway.client.get("/v1/models", headers=tenant).status_code == 200  # it asks no model


def test_a_refused_turn_of_a_session_leaves_nothing(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    session = gateway.session(tenant)
    limit(gateway, admin, f"{name}/keys/{key_of(tenant)}", tokens_per_minute=60)
    gateway.turn(session, "hi", tenant, max_output_tokens=20)
    with nothing_saved(gateway):
        for stream in (False, True):
            body = {"input": "hi again", "max_output_tokens": 50, "stream": stream}
            answer = gateway.client.post(f"/v1/sessions/{session}/turns", json=body, headers=tenant)
            told = refused(answer, 429, "rate_limit_exceeded")
            assert (told["details"]["name"], told["details"]["of"]) == ("tokens_per_minute", "key")
            assert told["details"]["limit"] == 60
            assert answer.headers["x-ratelimit-limit-tokens"] == "60"
    page = gateway.client.get(f"/v1/sessions/{session}/turns", headers=tenant).json()
    assert len(page["data"]) == 1


def test_tokens_that_were_reserved_too_many_come_back(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    limit(gateway, admin, name, tokens_per_minute=2000)
    for _ in range(4):  # each may take more than half of them
        answer = chat(gateway, tenant, max_tokens=1200)
        assert answer.status_code == 200, answer.text
        until(lambda: not gateway.gateway.room.gate._tasks)


def test_turns_at_once_are_free_again_after_cancel_and_disconnect(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    limit(gateway, admin, name, concurrent_turns=1)
    session = gateway.session(tenant)
    path = f"/v1/sessions/{session}/turns"

    def slow(stop: Callable[[httpx.Response], object]) -> None:
        body = {"input": SLOW, "max_output_tokens": 400, "stream": True, "on_disconnect": "cancel"}
        with gateway.client.stream("POST", path, json=body, headers=tenant) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            next(lines)
            told = refused(chat(gateway, tenant), 429, "rate_limit_exceeded")
            assert told["details"] == {"name": "concurrent_turns", "of": "tenant", "limit": 1, "used": 1}
            stop(stream)

    def cancel(stream: httpx.Response) -> None:
        newest = gateway.client.get(f"{path}?order=desc&limit=1", headers=tenant).json()["data"][0]["id"]
        assert gateway.client.post(f"{path}/{newest}/cancel", headers=tenant).status_code == 202

    slow(cancel)
    until(lambda: chat(gateway, tenant).status_code == 200)
    until(lambda: not gateway.gateway.room.gate._held)
    slow(lambda stream: stream.close())
    until(lambda: chat(gateway, tenant).status_code == 200)


def test_many_at_once_are_never_more_than_may(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    limit(gateway, admin, name, concurrent_turns=3)
    body = {**CHAT, "messages": [{"role": "user", "content": SLOW}], "max_tokens": 60, "store": False}

    async def burst() -> list[int]:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client:
            asked = (client.post("/v1/chat/completions", json=body, headers=tenant) for _ in range(20))
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            most = max(most, len(gateway.gateway.room.gate._held))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        statuses = asyncio.run(burst())
    finally:
        done.set()
        watcher.join(5)
    assert sorted(statuses) == [200] * 3 + [429] * 17
    assert most == 3


def test_sessions_and_bytes_that_are_stored(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    limit(gateway, admin, name, sessions=2)
    first = gateway.session(tenant)
    assert chat(gateway, tenant).status_code == 200  # makes one of its own
    with nothing_saved(gateway):
        told = refused(gateway.client.post("/v1/sessions", headers=tenant), 403, "session_limit_exceeded")
        assert told["details"] == {"name": "sessions", "of": "tenant", "limit": 2, "used": 2}
        refused(chat(gateway, tenant, messages=[{"role": "user", "content": "new"}]), 403, "session_limit_exceeded")
        refused(gateway.client.post("/v1/conversations", headers=tenant), 403, "session_limit_exceeded")
        body = {"model": MODEL, "input": "x"}
        refused(gateway.client.post("/v1/responses", json=body, headers=tenant), 403, "session_limit_exceeded")
    assert chat(gateway, tenant, store=False).status_code == 200
    gateway.turn(first, "hi", tenant)
    limit(gateway, admin, name, stored_bytes=10)
    with nothing_saved(gateway):
        body = {"input": "more"}
        answer = gateway.client.post(f"/v1/sessions/{first}/turns", json=body, headers=tenant)
        assert refused(answer, 403, "storage_limit_exceeded")["details"]["limit"] == 10
        refused(gateway.client.post("/v1/sessions", headers=tenant), 403, "storage_limit_exceeded")
    assert gateway.client.delete(f"/v1/sessions/{first}", headers=tenant).status_code == 200


def test_a_months_tokens(gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]) -> None:
    limit(gateway, admin, name, month_tokens=100)
    assert chat(gateway, tenant).status_code == 200
    with nothing_saved(gateway):
        answer = chat(gateway, tenant, max_tokens=100)
        told = refused(answer, 429, "insufficient_quota")
        assert told["details"]["requested"] > 100
        assert int(answer.headers["retry-after"]) <= 31 * 86_400


def test_refusals_are_counted_by_limit(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    limit(gateway, admin, name, requests_per_minute=0)
    refused(chat(gateway, tenant), 429)
    metrics = generate_latest(gateway.live.app.state.metrics.registry).decode()
    assert 'turnkeep_limited_total{limit="requests_per_minute"}' in metrics


def test_an_operator_sets_sees_and_removes_limits(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    key = f"{name}/keys/{key_of(tenant)}"
    limit(gateway, admin, name, requests_per_minute=5)
    limit(gateway, admin, key, concurrent_turns=2)
    found = gateway.client.get("/admin/v1/limits", headers=admin).json()
    mine = {one["key"]: one["limits"] for one in found["data"] if one["tenant"] == name}
    assert mine[None]["requests_per_minute"] == 5
    assert mine[key_of(tenant)]["concurrent_turns"] == 2
    assert found["counted_in"] == "memory"
    shown = gateway.client.get(f"/admin/v1/limits/{name}", headers=admin).json()
    assert shown["limits"] == {**dict.fromkeys(shown["limits"]), "requests_per_minute": 5}
    for where in (name, key):
        gone = gateway.client.delete(f"/admin/v1/limits/{where}", headers=admin)
        assert set(gone.json()["limits"].values()) == {None}
    assert gateway.client.get(f"/admin/v1/limits/{key}", headers=admin).json()["updated_at"] is None
    page = gateway.within(gateway.gateway.store.list_audit(filter=AuditFilter(tenant_id=name)))
    assert {"limits.set", "limits.remove"} <= {record.line.action for record in page.records}


@pytest.mark.parametrize(
    ("where", "body", "status", "code"),
    [
        ("nobody", {}, 404, "tenant_not_found"),
        ("default/keys/tk-nobody", {}, 404, "key_not_found"),
        ("default", {"requests_per_minute": -1}, 400, "invalid_value"),
        ("default", {"requests_per_minute": 1.5}, 400, "invalid_value"),
        ("default", {"requests_per_minute": 1 << 60}, 400, "invalid_value"),
        ("default", {"requests_per_hour": 1}, 400, "unknown_field"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(
    gateway: Served, admin: dict[str, str], where: str, body: dict[str, Any], status: int, code: str
) -> None:
    refused(gateway.client.put(f"/admin/v1/limits/{where}", json=body, headers=admin), status, code)
    assert "default" not in {
        one["tenant"] for one in gateway.client.get("/admin/v1/limits", headers=admin).json()["data"]
    }


def test_the_command_sets_what_the_gateway_heeds(
    gateway: Served, admin: dict[str, str], name: str, tenant: dict[str, str]
) -> None:
    database = ["--database", f"sqlite:///{gateway.folder}/turnkeep.db"]

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["limits", *words, *database])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    run("set", name, "--requests-per-minute", "0", "--sessions", "7")
    until(lambda: chat(gateway, tenant).status_code == 429)
    run("set", name, "--requests-per-minute", "none")
    until(lambda: chat(gateway, tenant).status_code == 200)
    assert name in run("list")
    assert '"sessions": 7' in run("list", "--json")
    run("set", name, "--key", key_of(tenant), "--concurrent-turns", "3")
    assert key_of(tenant) in run("list")
    run("remove", name)
    run("remove", name, "--key", key_of(tenant))
    assert name not in run("list")
    for wrong in (
        ["set", "nobody", "--sessions", "1"],
        ["set", name],
        ["set", name, "--sessions", "x"],
        ["remove", name],
    ):
        assert CliRunner().invoke(app, ["limits", *wrong, *database]).exception is not None
