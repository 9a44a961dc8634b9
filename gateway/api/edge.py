"""The outermost layer: every request gets an id, every response carries it. Pure ASGI; knows no route."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestIds:
    """Sets `scope["turnkeep.request_id"]` and the header x-request-id. The client's own id is never trusted."""

    def __init__(self, app: ASGIApp, new_id: Callable[[str], str]) -> None:
        self.app = app
        self.new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = self.new_id("req")
        scope["turnkeep.request_id"] = request_id

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        await self.app(scope, receive, sent)
