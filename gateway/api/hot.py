"""The two routes that carry turns, called straight. The router answers every other, and describes these two.

Matching all routes, solving dependencies and wrapping `send` in layers that only translate errors cost a turn 12% of
its CPU, and each chunk two calls. Errors reach the edge either way, which has the one place that translates them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import chat, turns
from gateway.api.access import needs

CHAT = "/v1/chat/completions"
TURNS = re.compile(r"/v1/sessions/([^/]+)/turns")

_chats = needs("chat")
_sessions = needs("sessions")


class HotRoutes:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = None
        if scope["type"] == "http" and scope["method"] == "POST" and not scope.get("root_path"):
            call = _call(scope["path"])
        if call is None:
            await self.app(scope, receive, send)
            return
        response = await call(Request(scope, receive, send))
        await response(scope, receive, send)


def _call(path: str) -> Callable[[Request], Awaitable[Response]] | None:
    if path == CHAT:
        return _chat
    if (found := TURNS.fullmatch(path)) is not None:
        return lambda request: _turn(request, found[1])
    return None


async def _chat(request: Request) -> Response:
    return await chat.chat_completions(request, await _chats(request))


async def _turn(request: Request, session_id: str) -> Response:
    return await turns.create_turn(request, await _sessions(request), session_id)
