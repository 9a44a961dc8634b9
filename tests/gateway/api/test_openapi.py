"""The description is complete: every route, parameter, body field, error and the key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.api.openapi import OPEN, TAKES
from gateway.app import create_app
from gateway.settings import Settings

TOLD = create_app(Settings(auth=False)).openapi()
OPERATIONS = [(method, path, op) for path, methods in TOLD["paths"].items() for method, op in methods.items()]
IDS = [f"{method} {path}" for method, path, _ in OPERATIONS]
SAYS = {"type", "description", "enum", "const", "anyOf", "allOf", "items"}


def fields(schema: dict[str, Any], at: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{at}.{name}", field
        for inner in (field, *field.get("anyOf", []), field.get("items", {})):
            yield from fields(inner, f"{at}.{name}")


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=IDS)
def test_a_route_says_what_it_does_takes_and_answers(method: str, path: str, operation: dict[str, Any]) -> None:
    assert operation["summary"]
    assert all(p["description"] and p["schema"] for p in operation["parameters"])
    answers = operation["responses"]
    assert any(status.startswith("2") for status in answers)
    assert all(answer["description"] for answer in answers.values())
    errors = {status for status in answers if not status.startswith("2")}
    needed = {"431"} | (set() if path in OPEN else {"401", "403", "500", "503"})
    needed |= {"400", "408", "413", "415"} if "requestBody" in operation else set()
    needed |= {"404"} if "{" in path else set()
    assert needed <= errors, needed - errors
    for status in errors - ({"503"} if path == "/readyz" else set()):
        assert answers[status]["content"]["application/json"]["schema"]["required"] == ["error"], status


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS, ids=IDS)
def test_every_field_of_a_body_has_a_type_or_says_what_it_is(method: str, path: str, operation: dict[str, Any]) -> None:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        assert "$ref" not in str(content)
        assert all(SAYS & set(field) for _, field in fields(content["schema"]))


def test_every_route_but_the_open_ones_asks_for_a_key() -> None:
    assert TOLD["security"] == [{"apiKey": []}]
    assert TOLD["components"]["securitySchemes"]["apiKey"]["scheme"] == "bearer"
    assert {path for _, path, op in OPERATIONS if op.get("security") == []} == OPEN


def test_headers_are_named_on_routes_that_exist() -> None:
    assert set(TAKES) <= {(method, path) for method, path, _ in OPERATIONS}
