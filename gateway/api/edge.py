"""The outermost layer: every request gets an id, every response carries it; no failure leaves without its shape.

Pure ASGI; knows no route. With auth off only pages of this machine may ask: the Host must be a loopback name, and an
Origin the same host or an allowed one, so that no web page can reach the gateway through its visitor's browser.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.access import TOLD
from gateway.api.problems import bug_response, error_response
from gateway.errors import BadRequest, Forbidden, GatewayError, ShuttingDown
from gateway.sessions.failures import from_store
from gateway.store.records import StoreUnavailable

log = structlog.get_logger(__name__)

# Of /docs, the one page with a script that is not ours: it may load what it shows, and send nothing to anybody else.
DESCRIPTION_CSP = (
    "default-src 'none'; script-src 'unsafe-inline' https://cdn.jsdelivr.net; style-src 'unsafe-inline' "
    "https://cdn.jsdelivr.net; img-src 'self' data: https://fastapi.tiangolo.com; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Edge:
    """Sets `scope["turnkeep.request_id"]` and the header x-request-id. The client's own id is never trusted."""

    def __init__(
        self, app: ASGIApp, new_id: Callable[[str], str], *, local_only: bool, origins: frozenset[str]
    ) -> None:
        self.app = app
        self.new_id = new_id
        self.local_only = local_only
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = self.new_id("req")
        scope["turnkeep.request_id"] = request_id
        started = False

        async def sent(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
                if (told := scope.get(TOLD)) is not None and told.kinds:
                    headers.update(dict(told.headers()))
                if headers.get("content-type", "").startswith("text/html"):
                    headers.setdefault("content-security-policy", DESCRIPTION_CSP)
            await send(message)

        try:
            self._check(Headers(scope=scope))
            await self.app(scope, receive, sent)
        except GatewayError as error:
            await error_response(error, request_id)(scope, receive, sent)
        except asyncio.CancelledError:  # the server's grace is over; where an answer began, it cuts the connection
            if not started:
                await error_response(ShuttingDown(), request_id)(scope, receive, sent)
        except StoreUnavailable as error:
            if started:
                raise
            await error_response(from_store(error), request_id)(scope, receive, sent)
        except Exception as error:
            response = bug_response(error, request_id, scope["path"])
            if started:
                raise  # the server cuts the connection: a half answer must not look whole
            await response(scope, receive, sent)

    def _check(self, headers: Headers) -> None:
        """Raises BadRequest for a Host that is none, Forbidden for one or an Origin that may not ask."""
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (hosts and host_of(hosts[0]) is None):
            raise BadRequest("the Host header is not a host", code="invalid_host", param="Host")
        if not self.local_only:
            return
        if hosts and not _loopback(host_of(hosts[0]) or ""):
            raise Forbidden("auth is off: only a loopback Host is answered", code="host_not_allowed", param="Host")
        origin = headers.get("origin")
        if origin is not None and origin not in self.origins and urlsplit(origin).netloc not in hosts:
            raise Forbidden(
                "auth is off: pages of other origins may not ask", code="origin_not_allowed", param="Origin"
            )


@lru_cache(32)
def host_of(value: str) -> str | None:
    """The name in a Host header, without port and brackets; None where it is none."""
    try:
        parts = urlsplit(f"//{value}")
        parts.port  # noqa: B018 (raises where it is no number)
    except ValueError:
        return None
    plain = parts.netloc == value and not (set(value) & set("@ /?#\\")) and value.isascii() and value.isprintable()
    return parts.hostname if plain else None


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
