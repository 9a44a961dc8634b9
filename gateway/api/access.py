"""Who asks: the API key of a request, looked up once in a while, and the scope that a route needs.

What such a route does not take is refused here too, once it is known who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastapi import Request

from gateway.api.unasked import refuse_unasked
from gateway.limits.told import Told
from gateway.store.records import KeyRecord, StoreUnavailable
from gateway.store.sessions import Store
from gateway.tenancy import LOCAL, Identity, identify, key_digest, key_of, new_key, successor

TOLD = "turnkeep.told"  # of a request's scope: what its answer says of limits
REMEMBERED_S = 2.0  # a revoked key works at most this much longer
REMEMBERED_KEYS = 4096

_Known = tuple[float, bytes, KeyRecord | None]  # when the store said it, seconds; of which digest; what


class Access:
    """Looks keys up in the store and remembers them for two seconds; `believed_s`: and what the store said of one for
    so long while its database is away, for chats alone."""

    def __init__(
        self, store: Store, secret: bytes, *, auth: bool, clock: Callable[[], float], believed_s: float = 0.0
    ) -> None:
        self._store = store
        self._secret = secret
        self._auth = auth
        self._clock = clock
        self._believed_s = believed_s
        self._seen: OrderedDict[str, _Known] = OrderedDict()

    async def identity(self, authorization: str | None, *, chats: bool = False) -> Identity:
        """`chats`: for a route that may be answered without the database. Raises Unauthorized, StoreUnavailable."""
        if not self._auth:
            return replace(LOCAL, told=Told())
        key, now = key_of(authorization), self._clock()
        known = self._seen.get(key)
        if known is None or not 0 <= now - known[0] <= REMEMBERED_S:
            known = await self._looked_up(key, now, known if chats else None)
        identity = identify(known[1], known[2], now)
        self._store.touch_key(identity.tenant_id, identity.key_id)
        return identity

    async def _looked_up(self, key: str, now: float, known: _Known | None) -> _Known:
        """`known`: what to believe while the database is away, unless it is too old, or that there is no such key."""
        believed = known if known and known[2] and 0 <= now - known[0] <= self._believed_s else None
        if self._store.away and believed is not None:
            return believed
        digest = key_digest(self._secret, key)
        try:
            found = self._seen[key] = (now, digest, await self._store.find_key(digest))
        except StoreUnavailable:
            if believed is None:
                raise
            return believed
        self._seen.move_to_end(key)
        if len(self._seen) > REMEMBERED_KEYS:
            self._seen.popitem(last=False)
        return found

    def new_key(
        self, *, tenant_id: str, name: str, scopes: frozenset[str], expires_at: float | None
    ) -> tuple[str, KeyRecord]:
        """A fresh API key and the record to store. Raises ValueError for a tenant or a scope that cannot be."""
        return new_key(
            self._secret, tenant_id=tenant_id, name=name, scopes=scopes, now=self._clock(), expires_at=expires_at
        )

    def successor(self, old: KeyRecord) -> tuple[str, KeyRecord]:
        """The same, to stand in the place of `old`."""
        return successor(self._secret, old, now=self._clock())

    def forget(self, key_id: str) -> None:
        """Look this key up anew when it comes next: it was changed here just now."""
        for key in [key for key in self._seen if key.startswith(key_id)]:
            del self._seen[key]


def authorization_of(request: Request) -> str | None:
    """The header Authorization; or the key in `x-api-key`, where Anthropic's clients have it."""
    given, key = request.headers.get("authorization"), request.headers.get("x-api-key")
    return f"Bearer {key}" if given is None and key is not None else given


def needs(*scopes: str) -> Callable[[Request], Awaitable[Identity]]:
    """A dependency: the identity of a request whose key has one of `scopes`. Raises Unauthorized, Forbidden; but for
    OpenAI's routes (`chat` first), which take what they do not know, as `refuse_unasked`."""

    async def identity_of(request: Request) -> Identity:
        access: Access = request.app.state.gateway.access
        identity = await access.identity(authorization_of(request), chats=scopes[0] == "chat")
        identity.need(*scopes)
        request.scope[TOLD] = identity.told
        if scopes[0] != "chat":
            await refuse_unasked(request)
        return identity

    identity_of.__name__ = f"needs_{'_or_'.join(scopes)}"
    return identity_of
