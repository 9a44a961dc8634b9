"""What Alembic runs. The connection comes from `gateway.store.schema`; `alembic revision --autogenerate` brings none.

For that, and only that, TURNKEEP_DATABASE_URL names a database at the newest revision.
"""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection

from gateway.store.database import connect
from gateway.store.tables import metadata


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


async def run_alone() -> None:
    database = connect(os.environ["TURNKEEP_DATABASE_URL"])
    try:
        await database.write(run)
    finally:
        await database.close()


if (given := context.config.attributes.get("connection")) is not None:
    run(given)
else:
    asyncio.run(run_alone())
