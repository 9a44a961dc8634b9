"""The store of API keys and tenants; a part of `Store`."""

from __future__ import annotations

from collections.abc import Callable

from gateway.store import keys, tenants
from gateway.store.access import Access
from gateway.store.audit_records import AuditLine
from gateway.store.database import Database
from gateway.store.key_records import KeyPage, KeyRecord, TenantPage, TenantRecord
from gateway.store.records import StoreUnavailable


class KeyStore(Access):
    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        super().__init__(database, clock)
        self._used_keys: dict[tuple[str, str], float] = {}

    async def add_key(self, key: KeyRecord, *, new_tenant: bool = True, line: AuditLine | None = None) -> None:
        """`new_tenant`: a tenant that is not there is made too. Raises DuplicateId, NoTenant."""
        await self._write(lambda c: keys.add_key(c, key, self._clock(), new_tenant=new_tenant, line=line))

    async def find_key(self, digest: bytes) -> KeyRecord | None:
        """In any state: whether it is revoked or over is the caller's to judge."""
        return await self._read(lambda c: keys.find_key(c, digest))

    async def key_named(self, key_id: str) -> KeyRecord | None:
        """By the first characters that people see, of whichever tenant."""
        return await self._read(lambda c: keys.key_named(c, key_id))

    async def list_keys(self, tenant_id: str | None = None, *, limit: int = 20, cursor: str | None = None) -> KeyPage:
        """Of a tenant, or all; the newest first. Raises ValueError for a cursor that was not made here."""
        return await self._read(lambda c: keys.list_keys(c, tenant_id, limit, cursor))

    async def revoke_key(
        self, tenant_id: str, key_id: str, *, force: bool = False, line: AuditLine | None = None
    ) -> KeyRecord | None:
        """As it is then; a second time changes nothing. None: absent. Raises LastAdminKey unless `force`."""
        return await self._write(lambda c: keys.revoke_key(c, tenant_id, key_id, self._clock(), force=force, line=line))

    async def rotate_key(
        self, old: KeyRecord, new: KeyRecord, *, grace_s: float, force: bool, line: AuditLine
    ) -> tuple[KeyRecord, KeyRecord] | None:
        """(old, new) as they are then: `old` works on for `grace_s`, 0 ends it at once. None: absent.

        Raises KeyOver; LastAdminKey, unless `force`, with a grace of 0.
        """
        return await self._write(
            lambda c: keys.rotate_key(c, old, new, grace_s=grace_s, force=force, now=self._clock(), line=line)
        )

    def touch_key(self, tenant_id: str, key_id: str) -> None:
        """Note that the key was used now; `flush_keys` writes it."""
        self._used_keys[tenant_id, key_id] = self._clock()

    async def flush_keys(self) -> None:
        """Write when keys were last used; the gateway calls it from time to time, `close` at the end."""
        if self._used_keys:
            used, self._used_keys = self._used_keys, {}
            try:
                await self._write(lambda c: keys.touch_keys(c, used))
            except StoreUnavailable:
                self._used_keys = used | self._used_keys
                raise

    async def add_tenant(self, tenant_id: str, name: str, *, line: AuditLine | None = None) -> bool:
        """False: it was there already."""
        return await self._write(lambda c: tenants.add_tenant(c, tenant_id, name, self._clock(), line))

    async def get_tenant(self, tenant_id: str) -> TenantRecord | None:
        return await self._read(lambda c: tenants.get_tenant(c, tenant_id, self._clock()))

    async def list_tenants(self, *, limit: int = 20, cursor: str | None = None) -> TenantPage:
        """The newest first. Raises ValueError for a cursor that was not made here."""
        return await self._read(lambda c: tenants.list_tenants(c, limit, cursor, self._clock()))
