"""Every admin action, and everything that erases, leaves its line in the audit log: each route by what it writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.gateway.served import Served, served
from tests.security.test_route_matrix import CLOSED

LIMITS = {"requests_per_minute": 100_000}
REPLICA = {"url": "http://127.0.0.1:9", "name": "far"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("audited"), auth=True) as running:
        running.client.headers.update(running.key(scopes=frozenset({"admin"})))
        yield running


def count(gateway: Served) -> int:
    return len(gateway.within(gateway.gateway.store.list_audit(limit=10_000)).records)


def made(gateway: Served, path: str, **fields: Any) -> str:
    answer = gateway.client.post(path, json=fields)
    assert answer.status_code in (200, 201), answer.text
    return str(answer.json().get("id"))


def key(gateway: Served) -> str:
    return made(gateway, "/admin/v1/keys")


def session(gateway: Served) -> str:
    return made(gateway, "/v1/sessions")


def conversation(gateway: Served) -> str:
    return made(gateway, "/v1/conversations", items=[{"role": "user", "content": "hi"}])


def response(gateway: Served) -> str:
    return made(gateway, "/v1/responses", model="echo", input="hi")


def replica(gateway: Served) -> str:
    if gateway.client.get("/admin/v1/replicas/far").status_code == 404:
        gateway.client.post("/admin/v1/replicas", json=REPLICA).raise_for_status()
    return "far"


def nothing(gateway: Served) -> str:
    return ""


def limited_tenant(gateway: Served) -> str:
    gateway.client.put("/admin/v1/limits/default", json=LIMITS).raise_for_status()
    return "default"


def limited_key(gateway: Served) -> str:
    made = key(gateway)
    gateway.client.put(f"/admin/v1/limits/default/keys/{made}", json=LIMITS).raise_for_status()
    return made


def archived(gateway: Served) -> str:
    made = session(gateway)
    gateway.client.post(f"/v1/sessions/{made}/archive").raise_for_status()
    return made


# route -> what stands in its path (made first), its body, the action of its line
Row = tuple[Callable[[Served], str], Any, str]
LINES: dict[tuple[str, str], Row] = {
    ("POST", "/admin/v1/keys"): (nothing, {}, "key.create"),
    ("POST", "/admin/v1/keys/{key_id}/rotate"): (key, {}, "key.rotate"),
    ("POST", "/admin/v1/keys/{key_id}/revoke"): (key, {}, "key.revoke"),
    ("POST", "/admin/v1/tenants"): (nothing, {"id": "acme"}, "tenant.create"),
    ("POST", "/admin/v1/replicas"): (nothing, REPLICA, "replica.add"),
    ("POST", "/admin/v1/replicas/{name}/drain"): (replica, {}, "replica.drain"),
    ("POST", "/admin/v1/replicas/{name}/undrain"): (replica, {}, "replica.undrain"),
    ("DELETE", "/admin/v1/replicas/{name}"): (replica, None, "replica.remove"),
    ("PUT", "/admin/v1/limits/{tenant}"): (limited_tenant, LIMITS, "limits.set"),
    ("PUT", "/admin/v1/limits/{tenant}/keys/{key}"): (key, LIMITS, "limits.set"),
    ("DELETE", "/admin/v1/limits/{tenant}"): (limited_tenant, None, "limits.remove"),
    ("DELETE", "/admin/v1/limits/{tenant}/keys/{key}"): (limited_key, None, "limits.remove"),
    ("POST", "/v1/sessions/{session_id}/archive"): (session, {}, "session.archive"),
    ("POST", "/v1/sessions/{session_id}/unarchive"): (archived, {}, "session.unarchive"),
    ("DELETE", "/v1/sessions/{session_id}"): (session, None, "session.delete"),
    ("DELETE", "/v1/conversations/{conversation_id}"): (conversation, None, "session.delete"),
    ("DELETE", "/v1/responses/{response_id}"): (response, None, "response.delete"),
    ("POST", "/v1/sessions/import"): (nothing, {"object": "session", "format": 1, "model": "echo"}, "session.import"),
}
UNTOLD = {  # what deletes and is no erasure
    ("DELETE", "/v1/sessions/{session_id}/turns/{turn}/pin"): "a pin holds nothing",
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): "refused: items are parts of turns",
}


def test_every_admin_action_and_everything_that_deletes_has_a_row() -> None:
    acting = {(method, path) for method, path in CLOSED if method != "GET" and path.startswith("/admin/")}
    deleting = {(method, path) for method, path in CLOSED if method == "DELETE"}
    assert (acting | deleting) - set(UNTOLD) <= set(LINES), "say which line the route writes"


@pytest.mark.parametrize(("method", "path"), LINES)
def test_what_is_done_has_one_line_that_says_who_did_what_to_which_object(
    gateway: Served, method: str, path: str
) -> None:
    make, body, action = LINES[method, path]
    object_id = make(gateway)
    lines = count(gateway)
    where = re.sub(r"\{\w+\}", object_id, path.replace("{tenant}", "default"))
    answer = gateway.client.request(method, where, json=body)
    assert answer.is_success, answer.text
    assert count(gateway) == lines + 1
    line = gateway.client.get("/admin/v1/audit", params={"limit": 1}).json()["data"][0]
    told = answer.json() if answer.content else {}
    assert line["action"] == action
    assert line["target"] == (object_id or told.get("name" if "replicas" in path else "id"))
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["outcome"], line["who"]) == ("done", gateway.client.headers["authorization"][7:18])
    assert line["tenant"] == (None if "replicas" in path else "acme" if path == "/admin/v1/tenants" else "default")


def test_an_end_user_s_erasure_is_told_without_a_word_of_who_it_was(gateway: Served) -> None:
    made(gateway, "/v1/sessions", user_ref="ann@example.org")
    answer = gateway.client.post("/v1/erasures", json={"user": "ann@example.org"})
    assert answer.is_success, answer.text
    lines = gateway.client.get("/admin/v1/audit", params={"action": "user.erase"}).json()["data"]
    assert [line["request_id"] for line in lines] == [answer.headers["x-request-id"]]
    assert "ann" not in gateway.client.get("/admin/v1/audit", params={"limit": 100}).text


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/admin/v1/replicas/echo"), ("POST", "/admin/v1/tenants")])
def test_what_is_refused_of_an_object_that_is_there_has_its_line_and_changes_nothing(
    gateway: Served, method: str, path: str
) -> None:
    body = {"id": "default"} if method == "POST" else None
    answer = gateway.client.request(method, path, json=body)
    assert answer.status_code == 409, answer.text
    line = gateway.client.get("/admin/v1/audit", params={"limit": 1}).json()["data"][0]
    assert line["outcome"] == answer.json()["error"]["code"]
    assert line["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("method", ["DELETE", "POST"])
def test_what_is_not_there_and_who_may_not_ask_leave_no_line(gateway: Served, method: str) -> None:
    lines = count(gateway)
    weak = gateway.key()
    path = "/v1/sessions/none" if method == "DELETE" else "/admin/v1/keys/tk-AAAAAAAA/revoke"
    assert gateway.client.request(method, path).status_code == 404
    assert gateway.client.post("/admin/v1/keys", json={}, headers=weak).status_code == 403
    assert gateway.client.post("/admin/v1/keys", json={}, headers={"authorization": "none"}).status_code == 401
    assert count(gateway) == lines
