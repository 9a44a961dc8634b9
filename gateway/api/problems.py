"""Errors as clients see them: one JSON shape, on every route, with the request's id. The edge of the error tree."""

from __future__ import annotations

import math
from typing import Any

import orjson
import structlog
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.openapi import methods_of
from gateway.errors import BadRequest, GatewayError
from gateway.traces import trace_of

log = structlog.get_logger(__name__)

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def error_json(error: GatewayError, request_id: str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "type": error.type,
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "request_id": request_id,
    }
    if error.details:
        told["details"] = error.details
    return {"error": told}


def error_response(error: GatewayError, request_id: str) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(error_json(error, request_id)), error.status, headers, media_type="application/json")


def request_id_of(request: Request) -> str:
    return str(request.scope.get("turnkeep.request_id", ""))


async def on_gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_response(error, request_id_of(request))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    told = GatewayError(
        f"{request.method} {request.url.path[:200]}: {error.detail}",
        status=error.status_code,
        code=_HTTP_CODES.get(error.status_code, "http_error"),
    )
    told.type = "invalid_request_error"
    response = error_response(told, request_id_of(request))
    response.headers.update(error.headers or {})
    if error.status_code == 405:  # the framework names the methods of one route; a path may have several
        known = request.app.openapi()["paths"].items()
        methods = methods_of(known, request.url.path) or {"GET"}
        response.headers["allow"] = ", ".join(sorted(methods))
    return response


def bug_response(error: Exception, request_id: str, path: str) -> Response:
    """Our own mistake: the log has the trace, the client the id to ask for it."""
    log.error("request failed", request_id=request_id, path=path[:200], trace=trace_of(error))
    told = GatewayError("something went wrong inside the gateway; the log has the reason under this request id")
    return error_response(told, request_id)


async def on_invalid(request: Request, error: Exception) -> Response:
    """A path or query parameter that FastAPI refused."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = str(first["loc"][-1])[:100]
    return error_response(BadRequest(f"{where}: {first['msg']}", param=where), request_id_of(request))
