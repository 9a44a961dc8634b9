"""Reads a request body: bounded while it streams, JSON only, strict about what no database or tokenizer should see."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from gateway.errors import BadRequest, GatewayError, TooLarge, TooSlow, UnsupportedMedia
from gateway.settings import Settings

MAX_DEPTH = 64  # nested arrays and objects; a chat request has about eight
MAX_VALUES = 200_000  # in one body: 10,000 messages have 60,000; more would hold the loop while they are parsed
MAX_PLACE = 200  # characters of a field's path in an error
BIG_BODY = 262_144  # bytes; parsing more takes milliseconds
SLOWEST_BYTES_PER_S = 1024
JSON_TYPES = frozenset({"application/json"})
M = TypeVar("M", bound=BaseModel)

_NUL = (b"\x00", b"\\u0000")
_NUL_CHARACTER = re.compile("\x00")
_SURROGATE_CHARACTER = re.compile("[\ud800-\udfff]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


async def read_body(request: Request, limit: int, *, pause_s: float, types: frozenset[str] = JSON_TYPES) -> bytes:
    """The whole body, at most `limit` bytes, of one of the media `types`. Raises as `check_media`, `read_bytes`."""
    check_media(request, types)
    return await read_bytes(request, limit, pause_s=pause_s)


async def read_bytes(request: Request, limit: int, *, pause_s: float) -> bytes:
    """The whole body, at most `limit` bytes, whatever it is said to be.

    Raises TooLarge (413) as soon as more is announced or has come; TooSlow (408) where nothing comes for `pause_s`, or
    it comes more slowly than 1 KiB/s after that time.
    """
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and (len(announced) > 15 or int(announced) > limit):
        raise TooLarge(f"the body has {announced[:20]} bytes, the limit is {limit}")
    chunks, size = [], 0
    began = time.monotonic()
    pieces = request.stream()
    try:
        while True:
            async with asyncio.timeout(pause_s):
                chunk = await anext(pieces, None)
            if chunk is None:
                break
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body has more than the {limit} bytes allowed")
            if time.monotonic() - began > pause_s + size / SLOWEST_BYTES_PER_S:
                raise TooSlow(f"the body came more slowly than {SLOWEST_BYTES_PER_S} bytes a second")
            chunks.append(chunk)
    except TimeoutError:
        raise TooSlow(f"nothing of the body came for {pause_s:g} s") from None
    except ClientDisconnect as error:
        raise GatewayError(
            "the client left before its body was complete", status=400, code="incomplete_body"
        ) from error
    return b"".join(chunks)


def check_media(request: Request, types: frozenset[str] = JSON_TYPES) -> None:
    """Raises UnsupportedMedia (415) where the body is said to be none of the `types`, encoded, or not UTF-8."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("send the body without a content-encoding")
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind and kind not in types and not (types >= JSON_TYPES and kind.endswith("+json")):
        raise UnsupportedMedia(f"send the body as {' or '.join(sorted(types))}, not {kind[:64]!r}")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if charset is not None and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMedia(f"send the body as UTF-8, not {charset[1][:64]!r}")


async def json_object(
    request: Request, settings: Settings, *, images: bool = False, empty: bool = False
) -> tuple[bytes, dict[str, Any]]:
    """(body, the JSON object in it). `images`: they may come in it; `empty`: no body reads as {}.

    A big body is parsed beside the loop. Raises as `read_body` and `parse_object`.
    """
    limit = settings.max_image_body_bytes if images else settings.max_body_bytes
    body = await read_body(request, limit, pause_s=settings.body_timeout_s)
    if empty and not body.strip():
        return body, {}
    if len(body) > BIG_BODY:
        return body, await asyncio.to_thread(parse_object, body)
    return body, parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest (invalid_json, invalid_unicode); UnsupportedMedia for UTF-16."""
    _check_start(body)
    if len(body) > MAX_VALUES and _values(body) > MAX_VALUES:
        raise BadRequest(f"the body holds more than {MAX_VALUES} values", code="invalid_json")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        if (bad := _not_utf8(body)) is not None:
            raise BadRequest(f"the body is not UTF-8 (byte {bad})", code="invalid_unicode") from error
        if "surrogate" in error.msg or _lone_surrogate(body):
            where = _surrogate_place(body)
            raise BadRequest(
                f"{where or 'the body'} holds half of a surrogate pair ({place})", code="invalid_unicode", param=where
            ) from error
        raise BadRequest(f"the body is not valid JSON: {error.msg} ({place})", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
    if any(mark in body for mark in _NUL) and (where := _place_of(value, "", _NUL_CHARACTER)):
        raise BadRequest(f"{where} holds a NUL character, which is refused", code="invalid_unicode", param=where)
    return value


def _check_start(body: bytes) -> None:
    if body.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnsupportedMedia("send the body as UTF-8, not UTF-16")
    if body.startswith(b"\xef\xbb\xbf"):
        raise BadRequest("the body begins with a byte order mark; leave it out", code="invalid_json")


def _values(body: bytes) -> int:
    """At least how many values the JSON holds: what is between strings is looked at, strings are not.

    Every step is one pass over the bytes: a parser would first build what is to be refused.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if (quotes := bare.count(b'"')) > 4 * MAX_VALUES:
        return quotes // 2
    outside = b"".join(bare.split(b'"')[::2])
    return outside.count(b",") + outside.count(b"[") + outside.count(b"{")


def _not_utf8(body: bytes) -> int | None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def _lone_surrogate(body: bytes) -> bool:
    return _SURROGATE.search(body) is not None


def _surrogate_place(body: bytes) -> str | None:
    """The path of the string with half of a pair; None where the body is too big to look, or not JSON otherwise."""
    if len(body) > BIG_BODY:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if _deeper_than(value, MAX_DEPTH):
        return None
    return _place_of(value, "", _SURROGATE_CHARACTER)


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


def _place_of(value: Any, where: str, character: re.Pattern[str]) -> str | None:
    """Where a string with such a character stands: not every database stores it, so it is refused on all."""
    if isinstance(value, str):
        return (where or "the body") if character.search(value) else None
    if isinstance(value, dict):
        for key, inner in value.items():
            if character.search(key):
                return f"a key of {where or 'the body'}"
            if found := _place_of(inner, f"{where}.{key[:64]}" if where else key[:64], character):
                return found[:MAX_PLACE]
    if isinstance(value, list):
        for i, inner in enumerate(value):
            if found := _place_of(inner, f"{where}[{i}]", character):
                return found[:MAX_PLACE]
    return None


def validated(model: type[M], value: dict[str, Any]) -> M:
    """`value` as the model, strictly: no coercion. Raises BadRequest that names the first wrong field."""
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        where, first = _most_telling(error.errors(include_url=False, include_context=False, include_input=False), value)
        code = "unknown_field" if first["type"] == "extra_forbidden" else "invalid_value"
        told = (
            "is not a field here"
            if first["type"] == "extra_forbidden"
            else str(first["msg"]).removeprefix("Value error, ")
        )
        raise BadRequest(f"{where}: {told}", code=code, param=where) from None


def _most_telling(errors: list[Any], value: Any) -> tuple[str, Any]:
    """(place, error): of the alternatives that a field may be, the one that the value came nearest to."""
    placed = [(*_place(error["loc"], value, missing=error["type"] == "missing"), error) for error in errors]
    top = placed[0][0].partition(".")[0].partition("[")[0]
    same = [entry for entry in placed if entry[0].partition(".")[0].partition("[")[0] == top]
    where, _, error = max(same, key=lambda entry: (entry[1], not entry[2]["type"].endswith("_type")))
    return where[:MAX_PLACE], error


def _place(loc: tuple[int | str, ...], value: Any, *, missing: bool) -> tuple[str, int]:
    """(the field's path, its depth) of pydantic's location, whose names of alternatives are no part of the path."""
    out, depth = "", 0
    for n, part in enumerate(loc):
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value, out = value[part], f"{out}[{part}]"
        elif isinstance(value, dict) and (part in value or (missing and n == len(loc) - 1)):
            if part == "[key]":
                continue
            value, out = value.get(part), f"{out}.{str(part)[:64]}" if out else str(part)[:64]
        else:
            continue
        depth += 1
    return out or "body", depth
