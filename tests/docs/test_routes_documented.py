"""Every route stands in a page of docs/, and the pages name no route that is not there."""

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
ENGINE_PAGES = ("engine-wire.md", "engine.md", "engines.md", "kv-events.md")
OURS = [page for page in sorted(DOCS.glob("*.md")) if page.name not in ENGINE_PAGES]
NAMED = re.compile(r"\b(GET|POST|PUT|PATCH|DELETE) (/[^\s`?)…]*)")
OPENAPI: dict[str, Any] = create_app(Settings()).openapi()
ROUTES = sorted((method.upper(), path) for path, methods in OPENAPI["paths"].items() for method in methods)
BESIDE = {("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/admin")}  # pages, not in the description of the API


def named() -> dict[tuple[str, str], str]:
    return {
        (method, path.rstrip(".,;:")): page.name for page in OURS for method, path in NAMED.findall(page.read_text())
    }


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_route_stands_in_the_docs(method: str, path: str) -> None:
    assert (method, path) in named(), f"put `{method} {path}` into a page of docs/"


def test_the_docs_name_no_route_that_is_not_there() -> None:
    assert {route: page for route, page in named().items() if route not in {*ROUTES, *BESIDE}} == {}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_route_says_what_it_does_and_what_its_answers_mean(method: str, path: str) -> None:
    route = OPENAPI["paths"][path][method.lower()]
    assert route.get("summary")
    assert all(answer.get("description") for answer in route["responses"].values())
