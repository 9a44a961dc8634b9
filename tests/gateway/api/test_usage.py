"""`/v1/usage`: what a tenant used, by group, as JSON and as CSV, with its cost; by `turnkeep usage` too."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.store.usage_records import day_of, day_text
from gateway.tenancy import SCOPES
from tests.gateway.api.refusal import refused
from tests.gateway.served import Served, served

HOSTILE = '=HYPERLINK("http://x")'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    prices = {"echo": {"prompt": "2", "cached": "1", "output": "10"}}
    with served(tmp_path_factory.mktemp("usage"), auth=True, prices=prices, currency="EUR") as running:
        yield running


@pytest.fixture
def tenant(gateway: Served, request: pytest.FixtureRequest) -> dict[str, str]:
    """A header with a key of a tenant that the test has to itself."""
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
    return gateway.key(tenant=name, scopes=SCOPES)


def usage(gateway: Served, headers: dict[str, str], **query: Any) -> dict[str, Any]:
    gateway.within(gateway.gateway.store.flush_usage())
    answer = gateway.client.get("/v1/usage", params=query, headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_turns_are_counted_under_key_user_session_and_model(gateway: Served, tenant: dict[str, str]) -> None:
    session = gateway.session(tenant, user_ref="ann")
    turns = [gateway.turn(session, text, tenant)["usage"] for text in ("one", "two")]
    (line,) = usage(gateway, tenant, group_by="day,key,user,session,model")["data"]
    prompt, cached, output = (sum(t[f"{n}_tokens"] or 0 for t in turns) for n in ("prompt", "cached", "output"))
    key = tenant["authorization"].removeprefix("Bearer ")[:11]
    today = day_text(day_of(time.time()))
    names = {"day": today, "key": key, "user": "ann", "session": session, "model": "echo"}
    numbers = {"turns": 2, "requests": 0, "prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": output}
    assert {name: line[name] for name in (*names, *numbers)} == names | numbers
    assert line["total_tokens"] == prompt + output
    assert line["cost"] == pytest.approx(((prompt - cached) * 2 + cached + output * 10) / 1e6, abs=1e-6)


def test_what_no_session_keeps_is_counted_too(gateway: Served, tenant: dict[str, str]) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "user": "bob", "max_tokens": 8}
    for more in ({"store": False}, {"stream": True, "history": "off"}):
        answer = gateway.client.post("/v1/chat/completions", json={**body, **more}, headers=tenant)
        assert answer.status_code == 200, answer.text
    whole = {"model": "echo", "prompt": "go on", "max_tokens": 4, "user": "bob"}
    assert gateway.client.post("/v1/completions", json=whole, headers=tenant).status_code == 200
    (line,) = usage(gateway, tenant, group_by="user,session")["data"]
    assert (line["user"], line["session"]) == ("bob", None)
    assert (line["turns"], line["requests"]) == (2, 1)
    assert line["output_tokens"] > 0


def test_a_refused_turn_counts_nothing(gateway: Served, tenant: dict[str, str]) -> None:
    session = gateway.session(tenant)
    body = {"input": "word " * 200_000}
    assert gateway.client.post(f"/v1/sessions/{session}/turns", json=body, headers=tenant).status_code == 400
    assert usage(gateway, tenant)["data"] == []


def test_an_erased_session_leaves_its_counts(gateway: Served, tenant: dict[str, str]) -> None:
    session = gateway.session(tenant, user_ref="ann")
    gateway.turn(session, "forget me", tenant)
    before = usage(gateway, tenant)["data"]
    assert gateway.client.delete(f"/v1/sessions/{session}", headers=tenant).status_code == 200
    assert usage(gateway, tenant)["data"] == before
    (line,) = usage(gateway, tenant, group_by="user,session")["data"]
    assert (line["user"], line["session"]) == (None, None)


def test_a_tenant_sees_its_own_and_an_operator_all(gateway: Served, tenant: dict[str, str]) -> None:
    gateway.turn(gateway.session(tenant), "hi", tenant)
    stranger = gateway.key(tenant="stranger", scopes=frozenset({"read"}))
    assert usage(gateway, stranger)["data"] == []
    answer = gateway.client.get("/admin/v1/usage", headers=gateway.key(scopes=SCOPES))
    assert {"test-a-tenant-sees-its-own-and-an-operator-all"} <= {line["tenant"] for line in answer.json()["data"]}
    refused(gateway.client.get("/v1/usage?group_by=tenant", headers=stranger), 400, "invalid_request")


def test_csv_holds_the_same_and_no_formula(gateway: Served, tenant: dict[str, str]) -> None:
    session = gateway.session(tenant, user_ref=HOSTILE)
    gateway.turn(session, "hi", tenant)
    (line,) = usage(gateway, tenant, group_by="user,model")["data"]
    for asked in ({"params": {"format": "csv"}}, {"headers": {"accept": "text/csv"}}):
        query = {"group_by": "user,model", **asked.get("params", {})}
        answer = gateway.client.get("/v1/usage", params=query, headers={**tenant, **asked.get("headers", {})})
        assert answer.headers["content-type"].startswith("text/csv")
        (row,) = csv.DictReader(io.StringIO(answer.text))
        assert row["user"] == "'" + HOSTILE
        assert int(row["prompt_tokens"]) == line["prompt_tokens"]
        assert float(row["cost"]) == line["cost"]
        assert row["currency"] == "EUR"


def test_pages_lead_to_each_other(gateway: Served, tenant: dict[str, str]) -> None:
    made = sorted(gateway.session(tenant) for _ in range(3))
    for session in made:
        gateway.turn(session, "hi", tenant)
    seen, cursor = [], None
    for _ in made:
        page = usage(gateway, tenant, group_by="session", limit=1, **({"cursor": cursor} if cursor else {}))
        seen += [line["session"] for line in page["data"]]
        cursor = page["next_cursor"]
    assert (seen, cursor) == (made, None)
    answer = gateway.client.get("/v1/usage?group_by=session&limit=1&format=csv", headers=tenant)
    following = answer.headers["link"].partition("<")[2].partition(">")[0]
    assert made[1] in gateway.client.get(following, headers=tenant).text


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("group_by=hour", "group_by"),
        ("group_by=day,day", "group_by"),
        ("since=yesterday", "since"),
        ("since=2026-13-01", "since"),
        ("since=2026-11-02&until=2026-11-02", "until"),
        ("cursor=%21", "cursor"),
        ("cursor=WzFd", "cursor"),
        ("limit=0", "limit"),
        ("format=xml", "format"),
        ("user=%00", "user"),
    ],
)
def test_a_wrong_wish_is_refused_by_name(gateway: Served, tenant: dict[str, str], query: str, param: str) -> None:
    group = "" if "group_by" in query else "group_by=model&"
    assert refused(gateway.client.get(f"/v1/usage?{group}{query}", headers=tenant), 400)["param"] == param


def test_the_command_prints_a_table_json_and_csv(
    gateway: Served, tenant: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = gateway.session(tenant, user_ref=HOSTILE)
    gateway.turn(session, "hi", tenant)
    monkeypatch.setenv("TURNKEEP_API_KEY", tenant["authorization"].removeprefix("Bearer "))
    monkeypatch.setenv("TURNKEEP_URL", gateway.url)
    table = CliRunner().invoke(app, ["usage", "--by", "user,session"])
    assert session in table.stdout
    assert "cost in EUR" in table.stderr
    assert '"turns": 1' in CliRunner().invoke(app, ["usage", "--json"]).stdout
    told = CliRunner().invoke(app, ["usage", "--by", "user", "--csv"])
    (row,) = csv.DictReader(io.StringIO(told.stdout))
    assert row["user"] == "'" + HOSTILE
    everyone = CliRunner().invoke(app, ["usage", "--all-tenants", "--by", "tenant,day"])
    assert "test-the-command-prints-a-table-json-and-csv" in everyone.stdout
