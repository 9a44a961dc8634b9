"""API keys and tenants in the store; on both databases."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.store.audit_records import AuditLine
from gateway.store.key_records import KeyOver, KeyPage, KeyRecord, LastAdminKey, NoTenant, TenantRecord
from gateway.store.records import DuplicateId
from gateway.store.sessions import Store, open_store
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
NEW = replace(KEY, id="tk-new", digest=b"new", created_at=6.0, replaces=KEY.id)
ADMIN = replace(KEY, id="tk-adm", digest=b"a", scopes=frozenset({"admin"}), expires_at=None)
LINE = AuditLine("key.rotate", KEY.id, "acme", "tk-op", "req_1")


async def test_a_key_is_found_by_its_digest_alone(store: Store) -> None:
    await store.add_key(KEY)
    assert await store.find_key(KEY.digest) == KEY
    assert await store.find_key(b"other") is None


async def test_a_key_is_added_once_and_brings_its_tenant(store: Store) -> None:
    await store.add_key(KEY)
    for clash in (replace(KEY, digest=b"new"), replace(KEY, id="tk-new"), replace(KEY, tenant_id="x", digest=b"new")):
        with pytest.raises(DuplicateId):
            await store.add_key(clash)
    assert [tenant.id for tenant in (await store.list_tenants()).tenants] == ["acme", "default"]
    assert not await store.add_tenant("acme", "Acme")


async def test_a_key_brings_no_tenant_where_it_is_told_not_to(store: Store) -> None:
    with pytest.raises(NoTenant, match="acme"):
        await store.add_key(KEY, new_tenant=False, line=LINE)
    assert (await store.list_keys()).keys == ()
    assert (await store.list_audit()).records == ()


async def test_keys_are_listed_by_tenant_or_all_the_newest_first_page_by_page(store: Store) -> None:
    other = replace(KEY, id="tk-other", tenant_id="umbrella", digest=b"2", created_at=6.0)
    await store.add_key(KEY)
    await store.add_key(other)
    assert (await store.list_keys()).keys == (other, KEY)
    assert (await store.list_keys("umbrella")).keys == (other,)
    first = await store.list_keys(limit=1)
    assert first.keys == (other,)
    assert await store.list_keys(limit=1, cursor=first.next_cursor) == KeyPage((KEY,), None)
    with pytest.raises(ValueError, match="not made here"):
        await store.list_keys(cursor="x")


async def test_tenants_tell_how_many_of_their_keys_work(store: Store, clock: Clock) -> None:
    await store.add_tenant("acme", "Acme & sons")
    for number, end in enumerate((None, clock.now + 1, clock.now)):
        await store.add_key(replace(KEY, id=f"tk-{number}", digest=bytes([number]), expires_at=end))
    await store.revoke_key("acme", "tk-0")
    assert await store.get_tenant("acme") == TenantRecord("acme", "Acme & sons", clock.now, 1)
    assert await store.get_tenant("umbrella") is None
    first = await store.list_tenants(limit=1)
    assert [tenant.id for tenant in first.tenants] == ["acme"]
    assert [t.id for t in (await store.list_tenants(limit=1, cursor=first.next_cursor)).tenants] == ["default"]


async def test_a_key_is_revoked_once_and_once_told(store: Store, clock: Clock) -> None:
    await store.add_key(KEY)
    first = clock.now
    revoked = replace(KEY, revoked_at=first)
    assert await store.revoke_key("acme", KEY.id, line=LINE) == revoked
    clock.now += 5
    assert await store.revoke_key("acme", KEY.id, line=LINE) == revoked
    assert await store.revoke_key("umbrella", KEY.id, line=LINE) is None
    assert await store.find_key(KEY.digest) == await store.key_named(KEY.id) == revoked
    assert [record.line for record in (await store.list_audit()).records] == [LINE]


async def test_a_rotated_key_works_on_for_its_grace_and_both_name_each_other(store: Store, clock: Clock) -> None:
    old, new = replace(KEY, expires_at=clock.now + 100), replace(NEW, expires_at=clock.now + 100)
    await store.add_key(old)
    both = await store.rotate_key(old, new, grace_s=10, force=False, line=LINE)
    assert both == (replace(old, expires_at=clock.now + 10, replaced_by=NEW.id), new)
    assert (await store.find_key(old.digest), await store.find_key(new.digest)) == both
    assert [key.state(clock.now) for key in both] == ["ending", "active"]
    assert [key.state(clock.now + 10) for key in both] == ["expired", "active"]
    assert [record.line for record in (await store.list_audit()).records] == [LINE]


async def test_a_grace_ends_with_the_key_s_own_end(store: Store, clock: Clock) -> None:
    old = replace(KEY, expires_at=clock.now + 5)
    await store.add_key(old)
    both = await store.rotate_key(old, replace(NEW, expires_at=old.expires_at), grace_s=10, force=False, line=LINE)
    assert both is not None
    assert both[0].expires_at == old.expires_at


@pytest.mark.parametrize("state", ["ending", "expired", "revoked"])
async def test_what_is_over_is_not_rotated(store: Store, clock: Clock, state: str) -> None:
    spoilt = {
        "ending": {"expires_at": None, "replaced_by": "tk-later"},
        "expired": {},
        "revoked": {"expires_at": None, "revoked_at": 6.0},
    }[state]
    await store.add_key(replace(KEY, **spoilt))
    with pytest.raises(KeyOver, match=state):
        await store.rotate_key(KEY, NEW, grace_s=0, force=True, line=LINE)
    assert await store.find_key(NEW.digest) is None
    assert (await store.list_audit()).records == ()


async def test_of_two_rotations_at_once_one_is_refused(store: Store) -> None:
    old = replace(KEY, expires_at=None)
    await store.add_key(old)
    news = [replace(NEW, id=f"tk-{number}", digest=bytes([number]), expires_at=None) for number in range(2)]
    calls = (store.rotate_key(old, new, grace_s=10, force=False, line=LINE) for new in news)
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert sorted(isinstance(outcome, KeyOver) for outcome in ended) == [False, True]
    assert len((await store.list_keys()).keys) == 2


@pytest.mark.parametrize("other", ["none", "revoked", "ending", "expired", "of another scope"])
async def test_the_last_admin_key_that_works_stays_unless_forced(store: Store, clock: Clock, other: str) -> None:
    await store.add_key(ADMIN)
    spoilt = {
        "revoked": {"revoked_at": 1.0},
        "ending": {"replaced_by": "x", "expires_at": clock.now + 9},
        "expired": {"expires_at": clock.now},
        "of another scope": {"scopes": frozenset({"chat", "read"})},
    }
    if other != "none":
        await store.add_key(replace(ADMIN, id="tk-other", digest=b"o", **spoilt[other]))
    with pytest.raises(LastAdminKey, match=ADMIN.id):
        await store.revoke_key(ADMIN.tenant_id, ADMIN.id, line=LINE)
    new = replace(ADMIN, id="tk-new", digest=b"n", replaces=ADMIN.id)
    with pytest.raises(LastAdminKey, match=ADMIN.id):
        await store.rotate_key(ADMIN, new, grace_s=0, force=False, line=LINE)
    assert await store.find_key(ADMIN.digest) == ADMIN
    assert (await store.list_audit()).records == ()
    assert await store.revoke_key(ADMIN.tenant_id, ADMIN.id, force=True) is not None


async def test_an_admin_key_beside_another_one_is_revoked_and_rotated(store: Store) -> None:
    for number in range(3):
        await store.add_key(replace(ADMIN, id=f"tk-{number}", digest=bytes([number])))
    assert await store.revoke_key(ADMIN.tenant_id, "tk-0") is not None
    old, new = replace(ADMIN, id="tk-1", digest=b"\1"), replace(ADMIN, id="tk-new", digest=b"n")
    assert await store.rotate_key(old, new, grace_s=0, force=False, line=LINE) is not None


async def test_the_last_admin_key_is_rotated_with_a_grace(store: Store) -> None:
    await store.add_key(ADMIN)
    assert await store.rotate_key(ADMIN, replace(ADMIN, id="n", digest=b"n"), grace_s=1, force=False, line=LINE)


async def test_of_two_that_would_end_the_last_two_admin_keys_at_once_one_is_refused(url: str, clock: Clock) -> None:
    async with open_store(url, clock=clock) as one, open_store(url, clock=clock) as two:
        for number in range(2):
            await one.add_key(replace(ADMIN, id=f"tk-{number}", digest=bytes([number])))
        calls = (store.revoke_key(ADMIN.tenant_id, f"tk-{number}") for number, store in enumerate((one, two)))
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(isinstance(outcome, LastAdminKey) for outcome in ended) == [False, True]


async def test_the_last_use_is_written_in_one_go(store: Store, clock: Clock) -> None:
    await store.add_key(KEY)
    store.touch_key("acme", KEY.id)
    clock.now += 1
    store.touch_key("acme", KEY.id)
    store.touch_key("umbrella", KEY.id)
    assert await store.find_key(KEY.digest) == KEY
    await store.flush_keys()
    assert await store.find_key(KEY.digest) == replace(KEY, last_used_at=clock.now)
