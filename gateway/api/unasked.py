"""Refuses what a route does not take, a body or query parameters: a wish that is not heard must not look granted.

The route says what it takes, once: `openapi_extra` whether it has a body, its signature which parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastapi import Request
from fastapi.routing import APIRoute

from gateway.api.body import check_media, parse_object, read_bytes
from gateway.errors import BadRequest

MOST_BYTES = 65_536  # of a body that is not taken
KEYED = re.compile(r"([^\[\]]+)\[[^\[\]]*\]")  # of an object in the query: metadata[KEY]


@dataclass(frozen=True, slots=True)
class Takes:
    body: bool
    query: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()  # of them, those that come as NAME[KEY]=VALUE


async def refuse_unasked(request: Request) -> None:
    """Raises BadRequest (unknown_parameter, unknown_field) that names it; TooLarge, TooSlow, UnsupportedMedia.

    No body, and one that is `{}`, are the same. A request that came past the router is to a route that reads its body.
    """
    route = request.scope.get("route")
    takes = takes_of(route) if isinstance(route, APIRoute) else Takes(body=True)
    if request.scope.get("query_string"):
        _refuse_parameter(request, takes)
    if not takes.body:
        await _refuse_field(request)


def takes_of(route: APIRoute) -> Takes:
    extra = route.openapi_extra or {}
    objects = frozenset(p["name"] for p in extra.get("parameters", ()) if p.get("style") == "deepObject")
    query = frozenset(field.alias for field in route.dependant.query_params)
    return Takes("requestBody" in extra, query, objects)


def _refuse_parameter(request: Request, takes: Takes) -> None:
    for name in request.query_params:
        keyed = KEYED.fullmatch(name)
        if name not in takes.query and (keyed is None or keyed[1] not in takes.objects):
            known = sorted(takes.query | {f"{name}[KEY]" for name in takes.objects})
            told = f"there are {', '.join(known)}" if known else "this route has none"
            shown = name[:64]
            raise BadRequest(f"{shown}: is not a query parameter here: {told}", code="unknown_parameter", param=shown)


async def _refuse_field(request: Request) -> None:
    body = await read_bytes(request, MOST_BYTES, pause_s=request.app.state.gateway.settings.body_timeout_s)
    if not body.strip():
        return
    check_media(request)
    if fields := parse_object(body):
        shown = next(iter(fields))[:64]
        told = f"this route takes no body, and one of {len(body)} bytes came"
        raise BadRequest(f"{shown}: is not a field here: {told}", code="unknown_field", param=shown)
