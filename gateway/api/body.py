"""Reads a request body: bounded while it streams, JSON only, strict about what no database or tokenizer should see."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from gateway.errors import BadRequest, GatewayError, TooLarge, UnsupportedMedia

MAX_DEPTH = 64  # nested arrays and objects; a chat request has about eight
M = TypeVar("M", bound=BaseModel)

_NUL = (b"\x00", b"\\u0000")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, at most `limit` bytes. Raises TooLarge (413) as soon as more is announced or has come."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("send the body without a content-encoding")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise TooLarge(f"the body has {announced} bytes, the limit is {limit}")
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body has more than the {limit} bytes allowed")
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise GatewayError(
            "the client left before its body was complete", status=400, code="incomplete_body"
        ) from error
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest: invalid_json, invalid_unicode, too deep."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        if "surrogate" in error.msg or "utf-8" in error.msg.lower() or _lone_surrogate(body):
            raise BadRequest(
                f"the body holds text that is not valid Unicode ({place})", code="invalid_unicode"
            ) from error
        raise BadRequest(f"the body is not valid JSON: {error.msg} ({place})", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
    if any(mark in body for mark in _NUL) and (where := _nul_at(value, "")):
        raise BadRequest(f"{where} holds a NUL character, which is refused", code="invalid_unicode", param=where)
    return value


def _lone_surrogate(body: bytes) -> bool:
    return _SURROGATE.search(body) is not None


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    while level and depth >= 0:
        below: list[Any] = []
        for v in level:
            if isinstance(v, dict):
                below += [x for x in v.values() if isinstance(x, dict | list)]
            elif isinstance(v, list):
                below += [x for x in v if isinstance(x, dict | list)]
        level, depth = below, depth - 1
    return bool(level)


def _nul_at(value: Any, where: str) -> str | None:
    """Where a string with a NUL stands: it cannot be stored in every database, so it is refused on all."""
    if isinstance(value, str):
        return (where or "the body") if "\x00" in value else None
    if isinstance(value, dict):
        for key, inner in value.items():
            if "\x00" in key:
                return f"a key of {where or 'the body'}"
            if found := _nul_at(inner, f"{where}.{key}" if where else key):
                return found
    if isinstance(value, list):
        for i, inner in enumerate(value):
            if found := _nul_at(inner, f"{where}[{i}]"):
                return found
    return None


def validated(model: type[M], value: dict[str, Any]) -> M:
    """`value` as the model, strictly: no coercion. Raises BadRequest that names the first wrong field."""
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = _place(first["loc"])
        code = "unknown_field" if first["type"] == "extra_forbidden" else "invalid_value"
        told = "is not a field here" if first["type"] == "extra_forbidden" else first["msg"]
        raise BadRequest(f"{where}: {told}", code=code, param=where) from None


def _place(loc: tuple[int | str, ...]) -> str:
    out = ""
    for part in loc:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)[:100]
    return out or "body"
