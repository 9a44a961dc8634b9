"""The OpenAPI description as a whole: what every route shares is written into it once, when it is first asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI

from gateway.api.describe import problem

OPEN = frozenset({"/livez", "/readyz", "/metrics"})  # paths that need no key
EDGE = (400, 403, 431, 500)  # a Host that is none, or may not ask; too many headers; our own mistake
ANYWHERE = (*EDGE, 408, 413, 415)  # a body comes too slowly, is too large or of another kind: also where none is taken
BEARER = {
    "type": "http",
    "scheme": "bearer",
    "bearerFormat": "tk-…",
    "description": "An API key; `turnkeep keys create` makes one. Scopes: chat, sessions, read, admin.",
}
KEY = {"type": "string", "pattern": "^[A-Za-z0-9_.:@/+=-]{1,128}$"}
ONCE = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"}
HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Idempotency-Key": ("A repeated request under the same key gets the same answer, once.", ONCE),
    "If-Match": ("The session's ETag, or *.", {"type": "string"}),
    "Last-Event-ID": ("The last event seen; goes before `starting_after`.", {"type": "string"}),
    "X-Session-Id": ("The conversation that the messages belong to.", KEY),
    "X-Turnkeep-History": (
        "What becomes of the history.",
        {"type": "string", "enum": ["auto", "off", "match", "append", "replace"]},
    ),
    "X-Turnkeep-On-Disconnect": (
        "What becomes of the answer when the client leaves.",
        {"type": "string", "enum": ["cancel", "finish"]},
    ),
}
TAKES = {  # (method, path) -> headers
    ("post", "/v1/chat/completions"): (
        "Idempotency-Key",
        "X-Session-Id",
        "X-Turnkeep-History",
        "X-Turnkeep-On-Disconnect",
    ),
    ("post", "/v1/messages"): ("Idempotency-Key", "X-Session-Id", "X-Turnkeep-History", "X-Turnkeep-On-Disconnect"),
    ("post", "/v1/responses"): ("Idempotency-Key",),
    ("get", "/v1/responses/{response_id}"): ("Last-Event-ID",),
    ("post", "/v1/sessions"): ("Idempotency-Key",),
    ("patch", "/v1/sessions/{session_id}"): ("If-Match",),
    ("post", "/v1/sessions/{session_id}/turns"): ("Idempotency-Key",),
    ("post", "/v1/sessions/{session_id}/turns/{turn}/edit"): ("Idempotency-Key",),
    ("post", "/v1/sessions/{session_id}/turns/{turn}/regenerate"): ("Idempotency-Key",),
    ("get", "/v1/sessions/{session_id}/compactions/stream"): ("Last-Event-ID",),
    ("get", "/v1/sessions/{session_id}/stream"): ("Last-Event-ID",),
    ("get", "/v1/sessions/{session_id}/turns/{turn}/stream"): ("Last-Event-ID",),
}
PARAMETERS = {
    "session_id": "The session's id.",
    "turn": "The turn's id, or its seq.",
    "response_id": "The response's id, as its answer told it.",
    "conversation_id": "The conversation's id; any session's is one.",
    "item_id": "The item's id, as lists tell it.",
    "key_id": "The key's first eleven characters, as lists tell them.",
    "tenant": "The tenant's id.",
}


def describer(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """In place of `app.openapi`."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None or "security" not in app.openapi_schema:
            app.openapi_schema = completed(made())
        return app.openapi_schema

    return openapi


def completed(told: dict[str, Any]) -> dict[str, Any]:
    """With auth, headers, the errors that any route can give (in order); without the framework's own 422."""
    told["security"] = [{"apiKey": []}]
    told["components"] = {"securitySchemes": {"apiKey": BEARER}}
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            _complete(operation, path, method)
    return told


def _complete(operation: dict[str, Any], path: str, method: str) -> None:
    answers = operation["responses"]
    if "$ref" in str(answers.get("422", "")):
        del answers["422"]
    for status in EDGE if path in OPEN else ANYWHERE:
        answers.setdefault(str(status), problem(status))
    if path in OPEN:
        operation["security"] = []
    parameters = operation.setdefault("parameters", [])
    for parameter in parameters:
        parameter.setdefault("description", PARAMETERS.get(parameter["name"], parameter["name"].replace("_", " ")))
    for name in TAKES.get((method, path), ()):
        description, schema = HEADERS[name]
        parameters.append({"name": name, "in": "header", "description": description, "schema": schema})


def methods_of(paths: Iterable[tuple[str, Iterable[str]]], path: str) -> set[str]:
    """The methods, in capitals, of the described route that is this path, else of those that match it."""
    known = dict(paths)
    found = {method.upper() for method in known.get(path, ())}
    for template, methods in known.items() if not found else ():
        if re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)), path):
            found |= {method.upper() for method in methods}
    return found
