"""Brings a database to the schema of this version, or says plainly why it cannot be used.

A migration runs in one transaction under a lock: killed half way, it has done nothing, and is simply run again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from gateway.failpoints import Failpoints
from gateway.store.database import Database, connect, normalise, private_file

LIMIT_S = 600.0  # for one statement of a migration, and to wait for another process that migrates
_LOCK = text("SELECT pg_advisory_xact_lock(7452019314)")  # any number, the same in every version


class SchemaError(Exception):
    """The database cannot be used by this version as it is."""


class SchemaBehind(SchemaError):
    """Empty, or made by an older version: `turnkeep migrate` helps."""


class SchemaTooNew(SchemaError):
    """Made by a newer version."""


@dataclass(frozen=True, slots=True)
class SchemaState:
    """Revisions: where the database stands (None: empty) and what this version needs."""

    current: str | None
    head: str
    verdict: Literal["current", "behind", "too new"]

    def demand(self) -> None:
        """Raise SchemaBehind or SchemaTooNew unless the database is at `head`."""
        if self.verdict == "too new":
            raise SchemaTooNew(
                f"the database is at schema {self.current}, which this version of Turnkeep does not know: "
                "a newer version made it. Run that version, or go back to a backup from before the upgrade."
            )
        if self.verdict == "behind":
            stands = "has no schema yet" if self.current is None else f"is at schema {self.current}"
            raise SchemaBehind(f"the database {stands}; this version needs {self.head}. Run: turnkeep migrate")


async def migrate(url: str, revision: str = "head") -> str:
    """Upgrade (or, with an older `revision`, "base" included, downgrade) and return the revision reached, "" for base.

    Raises SchemaTooNew, StoreUnavailable, ValueError for a URL that names no database we know.
    """
    parsed = normalise(url)
    if parsed.get_backend_name() == "sqlite":
        private_file(parsed)
    database = connect(url, busy_timeout_s=LIMIT_S, failpoints=Failpoints.from_environ(os.environ))
    try:
        return await database.write(lambda connection: _migrate(connection, revision), ("migrate",)) or ""
    finally:
        await database.close()


async def schema_state(database: Database) -> SchemaState:
    """What `turnkeep doctor`, readiness and a start ask."""
    return await database.read(_state)


def _migrate(connection: Connection, revision: str) -> str | None:
    if connection.dialect.name == "postgresql":
        connection.execute(_LOCK)
    state = _state(connection)
    if state.verdict == "too new":
        state.demand()
    config = _config()
    config.attributes["connection"] = connection
    older = revision == "base" or (revision != "head" and _is_older(revision, state.current))
    (command.downgrade if older else command.upgrade)(config, revision)
    return MigrationContext.configure(connection).get_current_revision()


def _state(connection: Connection) -> SchemaState:
    script = ScriptDirectory.from_config(_config())
    head = script.get_current_head() or ""
    current = MigrationContext.configure(connection).get_current_revision()
    if current == head:
        return SchemaState(current, head, "current")
    known = current is None or current in {revision.revision for revision in script.walk_revisions()}
    return SchemaState(current, head, "behind" if known else "too new")


def _is_older(revision: str, current: str | None) -> bool:
    if current is None:
        return False
    below = ScriptDirectory.from_config(_config()).iterate_revisions(current, "base")
    return revision != current and revision in {step.revision for step in below}


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "migrations:")  # the package, wherever it is installed
    return config
