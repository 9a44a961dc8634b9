"""What a route does not take is refused on every route by the same words: a wish that nobody hears is no yes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.api.bodies import JSON
from tests.gateway.api.refusal import nothing_saved, refused
from tests.gateway.api.test_openapi import OPERATIONS
from tests.gateway.served import Served, served

STRICT = [(m.upper(), path, op) for m, path, op in OPERATIONS if path.startswith(("/v1/sessions", "/admin/v1"))]
BODILESS = [(method, path) for method, path, op in STRICT if "requestBody" not in op]
PLACES = {
    "{session_id}": "base",
    "{turn}": "1",
    "{compaction}": "cmp_none",
    "{name}": "echo",
    "{erasure_id}": "ers_none",
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("unasked")) as running:
        assert running.session(id="base") == "base"
        running.turn("base", "hi")
        yield running


def at(path: str) -> str:
    for name, value in PLACES.items():
        path = path.replace(name, value)
    return path


def test_the_routes_without_a_body_are_those() -> None:
    writes = {path.rsplit("/", 1)[-1] for method, path in BODILESS if method not in ("GET", "DELETE")}
    assert writes == {"archive", "unarchive", "cancel", "revert", "pin", "suspend", "resume"}
    assert len(BODILESS) > 15


@pytest.mark.parametrize(("method", "path"), BODILESS)
def test_a_field_where_no_body_is_taken_is_refused_and_nothing_is_done(gateway: Served, method: str, path: str) -> None:
    with nothing_saved(gateway):
        answer = gateway.client.request(method, at(path), content='{"dry_run": true}', headers=JSON)
        told = refused(answer, 400, "unknown_field", "dry_run")
    assert "17 bytes" in told["message"]


@pytest.mark.parametrize(("method", "path", "operation"), STRICT, ids=[f"{m} {path}" for m, path, _ in STRICT])
def test_a_parameter_that_is_none_is_refused_and_nothing_is_done(
    gateway: Served, method: str, path: str, operation: dict[str, list[dict[str, str]]]
) -> None:
    with nothing_saved(gateway):
        told = refused(gateway.client.request(method, f"{at(path)}?dry_run=true"), 400, "unknown_parameter", "dry_run")
    for parameter in operation["parameters"]:
        assert parameter["in"] != "query" or parameter["name"] in told["message"]


@pytest.mark.parametrize("body", [b"", b"{}", b" \n", b" { } "])
def test_no_body_and_an_empty_one_are_the_same(gateway: Served, body: bytes) -> None:
    for headers in ({}, JSON):
        answer = gateway.client.put("/v1/sessions/base/turns/1/pin", content=body, headers=headers)
        assert answer.status_code == 200, answer.text


def test_an_empty_form_of_curl_is_no_body(gateway: Served) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert gateway.client.post("/v1/sessions/base/archive", content=b"", headers=form).status_code == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"[]", JSON, 400, "invalid_json"),
        (b"null", JSON, 400, "invalid_json"),
        (b"{", JSON, 400, "invalid_json"),
        (b"\xff\xfe{\x00}\x00", JSON, 415, "unsupported_media_type"),
        (b"dry_run=true", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b"{}", {**JSON, "content-encoding": "gzip"}, 415, "unsupported_media_type"),
        (b"{" + b" " * 70_000 + b"}", JSON, 413, "request_too_large"),
    ],
    ids=["list", "null", "broken", "utf-16", "form", "gzip", "large"],
)
def test_what_is_no_object_is_refused_as_where_a_body_is_taken(
    gateway: Served, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    with nothing_saved(gateway):
        answer = gateway.client.request("DELETE", "/v1/sessions/base", content=body, headers=headers)
        refused(answer, status, code)


def test_metadata_is_asked_for_by_key(gateway: Served) -> None:
    made = gateway.session(metadata={"colour": "red"})
    found = gateway.client.get("/v1/sessions", params={"metadata[colour]": "red"}).json()["data"]
    assert [session["id"] for session in found] == [made]
    told = refused(gateway.client.get("/v1/sessions?meta[colour]=red"), 400, "unknown_parameter", "meta[colour]")
    assert "metadata[KEY]" in told["message"]


def test_what_a_stranger_sends_is_not_looked_at(tmp_path_factory: pytest.TempPathFactory) -> None:
    with served(tmp_path_factory.mktemp("stranger"), auth=True) as running:
        answer = running.client.post("/v1/sessions/base/archive?x=1", content='{"a": 1}')
        refused(answer, 401, "invalid_api_key")
