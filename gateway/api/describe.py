"""The OpenAPI description of routes that read their body themselves. Builds plain dicts, once, at import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from gateway.api.schemas import ErrorAnswer

MEANS = {
    400: "The request is wrong; `param` names the place.",
    401: "No valid API key.",
    403: "The key lacks the scope, or as much is stored as may be; with auth off, the Host or Origin may not ask.",
    404: "Not found, or another tenant's.",
    408: "The body pauses, or comes too slowly.",
    409: "The session is answering another turn (`session_busy`), or the id is taken.",
    412: "The version in If-Match is not the current one.",
    413: "The body has too many bytes.",
    415: "The body is of another media type, or has a content-encoding.",
    422: "Idempotency key reused with another body, or a tool output without its call.",
    428: "If-Match is needed.",
    429: "Over a limit of the tenant or the key, or as many turns wait as may; see Retry-After.",
    431: "The request line and headers are too large.",
    500: "A mistake inside the gateway.",
    502: "The engine failed.",
    503: "No replica can take the turn right now, or the database is away; see Retry-After.",
    504: "The engine did not answer in time.",
}


def inlined(model: type[BaseModel]) -> dict[str, Any]:
    """The model's JSON schema with its references resolved in place."""
    schema = model.model_json_schema(by_alias=True)
    shared = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                name = node["$ref"].rsplit("/", 1)[-1]
                if name == "JsonValue":
                    return {}
                return resolve(shared[name])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(value) for value in node] if isinstance(node, list) else node

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": inlined(model)}}}}


def problem(status: int) -> dict[str, Any]:
    return {"description": MEANS[status], "content": {"application/json": {"schema": inlined(ErrorAnswer)}}}


def answers(
    status: int,
    model: type[BaseModel] | None,
    *,
    streams: bool = False,
    media_type: str = "application/json",
    errors: Iterable[int] = (),
) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {media_type: {"schema": inlined(model) if model is not None else {"type": "string"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    told: dict[int | str, dict[str, Any]] = {status: {"description": "Successful.", "content": content}}
    for code in sorted({401, 403, 500, 503, *errors}):
        told[code] = problem(code)
    return told
