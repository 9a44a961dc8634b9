"""API keys and tenants in the store; on both databases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.store.records import DuplicateId, KeyRecord
from gateway.store.sessions import Store
from tests.gateway.store.conftest import Clock

pytestmark = pytest.mark.anyio

KEY = KeyRecord(
    id="tk-abc",
    tenant_id="acme",
    name="backend",
    digest=b"\0\xff" * 16,
    scopes=frozenset({"chat", "read"}),
    created_at=5.0,
    expires_at=9.5,
    revoked_at=None,
)


async def test_a_key_is_found_by_its_digest_alone(store: Store) -> None:
    await store.add_key(KEY)
    assert await store.find_key(KEY.digest) == KEY
    assert await store.find_key(b"other") is None


async def test_a_key_is_added_once_and_brings_its_tenant(store: Store) -> None:
    await store.add_key(KEY)
    for clash in (replace(KEY, digest=b"new"), replace(KEY, id="tk-new")):
        with pytest.raises(DuplicateId):
            await store.add_key(clash)
    assert await store.list_tenants() == (("acme", "acme"), ("default", "default"))
    assert not await store.add_tenant("acme", "Acme")


async def test_keys_are_listed_by_tenant_or_all(store: Store) -> None:
    other = replace(KEY, tenant_id="umbrella", digest=b"2")
    await store.add_key(KEY)
    await store.add_key(other)
    assert await store.list_keys() == (KEY, other)
    assert await store.list_keys("umbrella") == (other,)


async def test_a_key_is_revoked_once(store: Store, clock: Clock) -> None:
    await store.add_key(KEY)
    first = clock.now
    assert await store.revoke_key("acme", KEY.id)
    clock.now += 5
    assert await store.revoke_key("acme", KEY.id)
    assert not await store.revoke_key("umbrella", KEY.id)
    assert await store.find_key(KEY.digest) == replace(KEY, revoked_at=first)


async def test_the_last_use_is_written_in_one_go(store: Store, clock: Clock) -> None:
    await store.add_key(KEY)
    store.touch_key("acme", KEY.id)
    clock.now += 1
    store.touch_key("acme", KEY.id)
    store.touch_key("umbrella", KEY.id)
    assert await store.find_key(KEY.digest) == KEY
    await store.flush_keys()
    assert await store.find_key(KEY.digest) == replace(KEY, last_used_at=clock.now)
