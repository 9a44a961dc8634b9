"""The routes that take a JSON body, each with a body that it takes: tables of bad inputs vary them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import httpx

from tests.gateway.served import Served

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Route:
    """`body` has a place for more fields, in JSON; the session `base` has one turn."""

    name: str
    method: str
    path: str
    body: str
    ok: int = 200
    strict: bool = True  # refuses unknown fields by name
    answers: bool = False  # takes what shapes an answer (temperature, ...)
    field: str = ""  # of the new message

    def send(self, served: Served, content: bytes | str, headers: dict[str, str] | None = None) -> httpx.Response:
        given = {**JSON, "if-match": "*", **(headers or {})}
        return served.client.request(self.method, self.path, content=content, headers=given)

    def with_fields(self, fields: str = "") -> str:
        return self.body.replace("MORE", f",{fields}" if fields else "")

    def with_text(self, text: str) -> str:
        """`text` is JSON: the new message's content."""
        return self.with_fields().replace('"hi"', text)


ROUTES = (
    Route(
        "chat",
        "POST",
        "/v1/chat/completions",
        '{"model":"echo","history":"off","messages":[{"role":"user","content":"hi"}]MORE}',
        strict=False,
        answers=True,
        field="messages",
    ),
    Route("create", "POST", "/v1/sessions", '{"title":"hi"MORE}', ok=201),
    Route("patch", "PATCH", "/v1/sessions/base", '{"title":"hi"MORE}'),
    Route("turn", "POST", "/v1/sessions/base/turns", '{"input":"hi"MORE}', answers=True, field="input"),
    Route("edit", "POST", "/v1/sessions/base/turns/1/edit", '{"input":"hi"MORE}', answers=True, field="input"),
    Route("regenerate", "POST", "/v1/sessions/base/turns/1/regenerate", '{"instructions":"hi"MORE}', answers=True),
    Route("count", "POST", "/v1/sessions/base/count", '{"input":"hi"MORE}', field="input"),
    Route(
        "import",
        "POST",
        "/v1/sessions/import",
        '{"object":"session","format":1,"model":"echo","title":"hi"MORE}',
        ok=201,
    ),
)
ANSWERS = tuple(route for route in ROUTES if route.answers)
MESSAGES = tuple(route for route in ROUTES if route.field)
name: Callable[[Route], str] = lambda route: route.name  # noqa: E731 (an id for pytest)
