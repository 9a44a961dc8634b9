"""Who may call which route: each route x each kind of key. A route without a key's check fails here by name."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from gateway.app import create_app
from gateway.settings import Settings
from gateway.tenancy import SCOPES
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.served import Served, served

OPEN = {  # routes that need no key, and why
    "/livez": "a load balancer asks",
    "/readyz": "a load balancer asks",
    "/metrics": "numbers without names, for the network's own Prometheus",
    "/openapi.json": "the description holds nothing of anybody",
    "/docs": "the same, to read",
    "/docs/oauth2-redirect": "a part of it",
    "/admin": "the dashboard's static page; its calls carry a key",
    "/admin/{file}": "its script and style",
}


def flat(routes: list[BaseRoute]) -> Iterator[BaseRoute]:
    """Routes, those of included routers too."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", None), "routes", None)
        if inner is None:
            yield route
        else:
            yield from flat(list(inner))


APP_ROUTES = list(flat(create_app(Settings(auth=False)).routes))
CALLS = sorted((method, route.path) for route in APP_ROUTES for method in getattr(route, "methods", ()) - {"HEAD"})  # type: ignore[attr-defined]
CLOSED = [call for call in CALLS if call[1] not in OPEN]
PAGE = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
ROW = re.compile(r"^\| `([A-Z]+) (/\S*)` \| ([a-z, ]+) \|$", re.MULTILINE)
SCOPES_OF = {(method, path): frozenset(told.split(", ")) for method, path, told in ROW.findall(PAGE)}
KEYLESS = ("none", "empty", "basic", "unknown", "malformed", "long", "revoked", "expired")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("matrix"), auth=True) as running:
        yield running


@pytest.fixture(scope="module")
def keys(gateway: Served) -> dict[str, dict[str, str]]:
    return {
        "none": {},
        "empty": {"authorization": ""},
        "basic": {"authorization": "Basic dGs6dGs="},
        "unknown": {"authorization": "Bearer tk-" + "A" * 43},
        "malformed": {"authorization": "Bearer tk-' OR 1=1 --"},
        "long": {"authorization": "Bearer tk-" + "A" * 20_000},
        "revoked": gateway.key(revoked=True),
        "expired": gateway.key(expires_at=time.time() - 1),
        "chat": gateway.key(scopes=frozenset({"chat"})),
        "sessions": gateway.key(scopes=frozenset({"sessions"})),
        "read": gateway.key(scopes=frozenset({"read"})),
        "admin": gateway.key(scopes=frozenset({"admin"})),
    }


NAMED = {
    "{session_id}": "sess_none",
    "{turn}": "1",
    "{file}": "app.js",
    "{response_id}": "resp_none",
    "{conversation_id}": "conv_none",
    "{item_id}": "msg_none",
    "{name}": "none",
    "{key}": "none",
    "{compaction}": "cmp_none",
    "{key_id}": "tk-AAAAAAAA",
    "{tenant}": "none",
    "{erasure_id}": "ers_none",
}


def path_of(template: str) -> str:
    for name, value in NAMED.items():
        template = template.replace(name, value)
    assert "{" not in template, f"say what stands for the parameters of {template}"
    return template


def test_every_route_has_a_row_with_its_scopes_in_the_docs_and_no_other_has_one() -> None:
    missing = [f"| `{method} {path}` | SCOPES |" for method, path in CLOSED if (method, path) not in SCOPES_OF]
    assert not missing, f"put a row into docs/tenants.md for: {missing}"
    assert set(SCOPES_OF) == set(CLOSED)
    assert frozenset().union(*SCOPES_OF.values()) == SCOPES


def test_a_key_that_only_reads_changes_nothing_and_sees_no_other_tenant() -> None:
    opened = {(method, path) for (method, path), scopes in SCOPES_OF.items() if "read" in scopes}
    assert {method for method, _ in opened} == {"GET"}
    assert {path.split("/")[1] for _, path in opened} == {"v1"}
    assert opened == {(method, path) for method, path in CLOSED if method == "GET" and path.startswith("/v1/")}


def test_every_route_is_in_the_matrix() -> None:
    assert len(CLOSED) >= 26
    compatible = (
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/responses",
        "/v1/conversations",
        "/v1/messages",
    )
    assert {("POST", path) for path in compatible} <= set(CLOSED)
    assert {path for _, path in CALLS} >= set(OPEN)
    assert all(isinstance(route, APIRoute) for route in APP_ROUTES if route.path not in OPEN)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_without_a_good_key_nothing_is_answered_or_done(
    gateway: Served, keys: dict[str, dict[str, str]], method: str, path: str
) -> None:
    with nothing_saved(gateway):
        for kind in KEYLESS:
            answer = gateway.client.request(method, path_of(path), headers=keys[kind])
            assert refused(answer, 401, "invalid_api_key")["type"] == "authentication_error", kind
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_a_key_without_the_scope_is_forbidden(
    gateway: Served, keys: dict[str, dict[str, str]], method: str, path: str
) -> None:
    with nothing_saved(gateway):
        for kind in {"chat", "sessions", "read"} - SCOPES_OF[method, path]:
            refused(gateway.client.request(method, path_of(path), headers=keys[kind]), 403, "insufficient_scope")


@pytest.mark.parametrize(("method", "path"), [call for call in CLOSED if call[1] != "/admin/v1/live"])
def test_the_scope_and_admin_open_it(gateway: Served, keys: dict[str, dict[str, str]], method: str, path: str) -> None:
    for kind in SCOPES_OF[method, path] | {"admin"}:
        answer = gateway.client.request(method, path_of(path), headers={**keys[kind], "if-match": "*"}, content=b"[]")
        assert answer.status_code not in (401, 403, 405), answer.text
        assert answer.status_code < 500, answer.text


@pytest.mark.parametrize("path", OPEN)
def test_open_routes_answer_and_tell_nothing_of_a_tenant(gateway: Served, path: str) -> None:
    answer = gateway.client.get(path_of(path))
    assert answer.status_code == 200
    assert "tk-" not in answer.text.replace("tk-…", "").replace("tk-...", "")


def test_a_revoked_key_stops_working_while_it_is_remembered_for_seconds(gateway: Served) -> None:
    header = gateway.key()
    assert gateway.client.get("/v1/models", headers=header).status_code == 200
    key_id = header["authorization"].removeprefix("Bearer ")[:11]
    assert gateway.within(gateway.gateway.store.revoke_key("default", key_id))
    deadline = time.monotonic() + 4
    while gateway.client.get("/v1/models", headers=header).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    refused(gateway.client.get("/v1/models", headers=header), 401)
