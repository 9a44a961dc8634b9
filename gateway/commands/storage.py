"""The database and the secret, as the commands need them: opened, brought to this version, failures told.

SQLAlchemy and Alembic are imported when a database is used: the engine's process starts by the same command.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from gateway.commands.failure import CommandFailed, ExitCode
from gateway.secrets import SecretUnusable, load_secret
from gateway.settings import Settings, masked_url
from gateway.store.audit_records import by_command
from gateway.store.records import StoreUnavailable
from gateway.tenancy import SCOPES, new_key

if TYPE_CHECKING:
    from gateway.store.sessions import Store

T = TypeVar("T")


def migrate_database(settings: Settings, revision: str = "head") -> str:
    """Bring the database to `revision` and return the one it reached. Gateways that do so at once wait for each other.

    Raises CommandFailed.
    """
    from gateway.store.schema import migrate

    return _run(settings, migrate(settings.database_url, revision))


def with_store(settings: Settings, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the store, do `work`, close it. Raises CommandFailed."""

    from gateway.store.sessions import open_store

    async def opened() -> T:
        async with open_store(settings.database_url, synchronous=settings.sqlite_synchronous) as store:
            return await work(store)

    return _run(settings, opened())


def secret_of(settings: Settings) -> bytes:
    try:
        return load_secret(settings)
    except (SecretUnusable, OSError) as error:
        raise CommandFailed(ExitCode.SETTINGS, f"The secret cannot be used: {error}") from error


def first_key(settings: Settings, secret: bytes) -> str | None:
    """An admin's API key where the database has none yet, to be shown once; None where it has, or auth is off."""
    if not settings.auth:
        return None

    async def add(store: Store) -> str | None:
        if (await store.list_keys(limit=1)).keys:
            return None
        key, record = new_key(secret, name="first run", scopes=SCOPES, now=time.time())
        line = by_command("key.create", record.id, record.tenant_id, scopes=" ".join(sorted(SCOPES)))
        await store.add_key(record, line=line)
        return key

    return with_store(settings, add)


async def every_page(read: Callable[[str | None], Awaitable[tuple[Sequence[T], str | None]]]) -> list[T]:
    """All that a list holds, page after page. `read`: the cursor of a page -> the page, and the next one's."""
    found: list[T] = []
    cursor: str | None = None
    while True:
        page, cursor = await read(cursor)
        found += page
        if cursor is None:
            return found


def _run(settings: Settings, work: Awaitable[T]) -> T:
    from gateway.store.schema import SchemaError

    async def awaited() -> T:
        return await work

    url = masked_url(settings.database_url)
    try:
        return asyncio.run(awaited())
    except SchemaError as error:
        raise CommandFailed(ExitCode.DATABASE, f"{url} cannot be used: {error}") from error
    except (StoreUnavailable, OSError) as error:
        raise CommandFailed(
            ExitCode.DATABASE,
            f"The database {url} did not answer: {error}. Look whether it runs, may be written and has room; "
            "--database or TURNKEEP_DATABASE_URL names another.",
        ) from error
    except ValueError as error:
        raise CommandFailed(ExitCode.DATABASE, f"{url} is no database to use: {error}") from error


def schema_of(settings: Settings) -> str:
    """What the database's schema is, in words; it is not changed. Raises CommandFailed where it is of no use."""

    from gateway.store.schema import SchemaBehind

    async def look(store: Store) -> str:
        return (await store.schema()).head

    try:
        return f"{masked_url(settings.database_url)} at schema {with_store(settings, look)}"
    except CommandFailed as failure:
        if isinstance(failure.__cause__, SchemaBehind):
            return f"{masked_url(settings.database_url)}, to be migrated: {failure.__cause__}"
        raise
