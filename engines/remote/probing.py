"""Which of ROUTES a server answers, found out by asking each with an empty body."""

from __future__ import annotations

from collections.abc import Iterable

from engines.contract import ROUTES
from engines.remote.http import Upstream

_ABSENT = frozenset({401, 403, 404, 405, 501})  # 501: llama.cpp without --embeddings or --reranking


class Routes:
    """What one server answers. Asked again when its `epoch` changes, and where it failed: no answer is no knowledge."""

    def __init__(self, upstream: Upstream, *, prefix: str = "/v1", routes: Iterable[str] = ROUTES) -> None:
        self._upstream = upstream
        self._prefix = prefix
        self._routes = tuple(routes)
        self._found: dict[str, bool] = {}
        self._epoch: str | None = None

    async def probe(self, epoch: str | None = None) -> frozenset[str]:
        """Raises EngineError when nothing answers."""
        if epoch != self._epoch:
            self._found.clear()
            self._epoch = epoch
        for route in self._routes:
            if route in self._found:
                continue
            reply = await self._upstream.post(self.path(route), b"{}")
            if reply.status < 500 or reply.status == 501:
                self._found[route] = reply.status not in _ABSENT
        return frozenset(route for route, there in self._found.items() if there)

    def path(self, route: str) -> str:
        """Where this server has the route, below its URL."""
        return self._prefix + route.removeprefix("/v1")
