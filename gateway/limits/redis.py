"""Limits counted in a Redis: windows by the library's own storage, slots in a sorted set for each holder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import redis.asyncio
from limits.aio.storage import RedisStorage
from redis.exceptions import RedisError

from gateway.limits.counters import Counters
from gateway.limits.windows import Windows
from gateway.store.limit_records import Holder

PREFIX = "turnkeep"
CONNECTIONS = 16
ANSWER_S = 1.0  # a Redis that does not answer for so long is gone

# KEYS: a set of each holder. ARGV: the turn, how long it is good, then how many each may have.
# -> 0, or the place of the holder that has no slot free, and how many it has. By Redis' own clock, in seconds.
TAKE = """
local t = redis.call('TIME')
local now = tonumber(t[1]) + tonumber(t[2]) / 1000000
for i, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  local taken = redis.call('ZCARD', key)
  if taken >= tonumber(ARGV[2 + i]) then return {i, taken} end
end
for _, key in ipairs(KEYS) do
  redis.call('ZADD', key, now + tonumber(ARGV[2]), ARGV[1])
  redis.call('PEXPIRE', key, math.ceil(tonumber(ARGV[2]) * 2000))
end
return {0, 0}
"""
HOLD = """
local t = redis.call('TIME')
local until_ = tonumber(t[1]) + tonumber(t[2]) / 1000000 + tonumber(ARGV[2])
for _, key in ipairs(KEYS) do
  redis.call('ZADD', key, until_, ARGV[1])
  redis.call('PEXPIRE', key, math.ceil(tonumber(ARGV[2]) * 2000))
end
return 0
"""


class RedisSlots:
    shared = True

    def __init__(self, client: redis.asyncio.Redis, lease_s: float) -> None:
        self._client = client
        self._lease_s = lease_s
        self._take = client.register_script(TAKE)
        self._hold = client.register_script(HOLD)

    async def take(self, wanted: Sequence[tuple[Holder, int]], id: str) -> tuple[Holder, int] | None:
        keys = [_key(holder) for holder, _ in wanted]
        place, taken = await self._take(keys=keys, args=[id, self._lease_s, *(most for _, most in wanted)])
        return None if place == 0 else (wanted[int(place) - 1][0], int(taken))

    async def hold(self, held: Sequence[tuple[Holder, str]]) -> None:
        for holder, id in held:
            await self._hold(keys=[_key(holder)], args=[id, self._lease_s])

    async def free(self, holders: Sequence[Holder], id: str) -> None:
        for holder in holders:
            await self._client.zrem(_key(holder), id)


def _key(holder: Holder) -> str:
    return f"{PREFIX}/slots/{holder}"


@asynccontextmanager
async def redis_counters(url: str, lease_s: float) -> AsyncIterator[Counters]:
    """Connects at first use."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url.replace("redis+unix://", "unix://"),
        max_connections=CONNECTIONS,
        timeout=ANSWER_S,
        socket_timeout=ANSWER_S,
        socket_connect_timeout=ANSWER_S,
    )
    client = redis.asyncio.Redis(connection_pool=pool)  # the library's storage speaks through the same connections
    storage = RedisStorage(
        f"async+{url}",
        implementation="redispy",
        key_prefix=PREFIX,
        connection_pool=pool,  # type: ignore[arg-type]
    )
    try:
        yield Counters(Windows(storage), RedisSlots(client, lease_s), (RedisError, OSError))
    finally:
        await client.aclose()
        await pool.disconnect()
